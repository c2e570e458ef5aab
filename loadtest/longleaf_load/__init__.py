"""Long-context load tests: who asks what and when, what came back, and what that means."""
