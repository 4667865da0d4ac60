"""Cards and cordons in key-value buckets of JetStream."""

from kvrouter.transports.records.nats.cards import NatsDiscovery
from kvrouter.transports.records.nats.cordons import NatsCordons

__all__ = ["NatsCordons", "NatsDiscovery"]
