"""Discovery: a port and its adapters."""
