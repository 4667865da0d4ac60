"""KV events without a broker: workers publish on a socket of their own, routers connect to each of them."""

from kvrouter.planes.events.zmq.publisher import ZmqEventPublisher
from kvrouter.planes.events.zmq.subscriber import ZmqEventSubscriber

__all__ = ["ZmqEventPublisher", "ZmqEventSubscriber"]
