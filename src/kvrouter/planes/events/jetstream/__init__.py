"""The event lane that remembers: one persistent JetStream stream a component, and snapshots of the index."""

from kvrouter.planes.events.jetstream.publisher import JetStreamPublisher
from kvrouter.planes.events.jetstream.subscriber import JetStreamSubscriber
from kvrouter.planes.events.jetstream.words import LaneObserver, StreamLimits

__all__ = ["JetStreamPublisher", "JetStreamSubscriber", "LaneObserver", "StreamLimits"]
