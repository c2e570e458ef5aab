"""Routing: which of the replicas that could take a request gets it."""
