"""Transports between processes: requests, KV events, discovery, replica sync."""
