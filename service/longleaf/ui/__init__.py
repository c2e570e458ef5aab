"""The status page: what the gateway and its replicas do now, on one page without assets."""
