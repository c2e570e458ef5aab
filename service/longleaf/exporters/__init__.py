"""Exporters: what Prometheus scrapes beside the service itself."""
