"""Event transports: the port of KV events and loads, and its adapters (ZeroMQ, NATS, JetStream, memory)."""
