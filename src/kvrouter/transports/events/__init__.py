"""KV events: a port and its adapters."""
