"""Request transports: the port and its adapters (tcp, http, NATS, memory)."""
