"""Longleaf: long-context chat served with tree-speculative decoding."""

__version__ = "0.1.0"
