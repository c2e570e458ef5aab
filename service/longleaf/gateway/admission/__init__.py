"""Admission: whether a request can be served at all."""
