"""What it takes to serve a traffic within an objective: replicas, memory, pods, money."""
