"""Probes: each answers one question about a running system, in words, JSON and a picture."""
