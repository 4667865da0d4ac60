"""Discovery by a JetStream key-value bucket."""

from kvrouter.transports.discovery.nats.cordons import NatsCordons
from kvrouter.transports.discovery.nats.discovery import NatsDiscovery

__all__ = ["NatsCordons", "NatsDiscovery"]
