"""Replicas: one client each, their health, their limits, and the list of them."""
