"""The embedded engine's HTTP server: SGLang's surface."""
