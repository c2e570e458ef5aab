"""``longleaf cluster``: look at a release in Kubernetes, drain an engine, collect a bundle."""
