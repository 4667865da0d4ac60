"""Discovery by a JetStream key-value bucket."""

from kvrouter.planes.discovery.nats.discovery import NatsDiscovery

__all__ = ["NatsDiscovery"]
