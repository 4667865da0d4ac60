"""Transports between processes: requests, KV events, records (cards and cordons), replica sync."""
