"""The wires: requests to workers, KV events from workers, and who is there."""
