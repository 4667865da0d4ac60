"""Discovery by a JetStream key-value bucket."""

from kvrouter.transports.discovery.nats.discovery import NatsDiscovery

__all__ = ["NatsDiscovery"]
