"""The whole service on one machine: embedded engine and gateway, started and stopped as one."""
