"""KV events over JetStream: a persistent stream for each component, and snapshots of the index."""

from kvrouter.transports.events.jetstream.publisher import JetStreamPublisher
from kvrouter.transports.events.jetstream.stream import EventTransportObserver, StreamLimits
from kvrouter.transports.events.jetstream.subscriber import JetStreamSubscriber

__all__ = ["EventTransportObserver", "JetStreamPublisher", "JetStreamSubscriber", "StreamLimits"]
