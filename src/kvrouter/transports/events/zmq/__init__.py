"""KV events over ZeroMQ, without a broker: routers connect to each worker."""

from kvrouter.transports.events.zmq.publisher import ZmqEventPublisher
from kvrouter.transports.events.zmq.subscriber import ZmqEventSubscriber

__all__ = ["ZmqEventPublisher", "ZmqEventSubscriber"]
