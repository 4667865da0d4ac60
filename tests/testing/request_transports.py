"""The wires that the request plane's contract runs over: a name, and what brings one up for one test."""

from collections.abc import Awaitable, Callable

from tests.testing.request_transport import RequestTransportSetup
from tests.testing.request_transport_http import http_transport, proxied_http_transport
from tests.testing.request_transport_memory import memory_transport
from tests.testing.request_transport_nats import nats_transport, proxied_nats_transport
from tests.testing.request_transport_tcp import proxied_tcp_transport, tcp_transport

__all__ = ["PROXIED_REQUEST_TRANSPORTS", "REQUEST_TRANSPORTS", "RequestTransportSetup"]

REQUEST_TRANSPORTS: dict[str, Callable[[], Awaitable[RequestTransportSetup]]] = {
    "http": http_transport,
    "memory": memory_transport,
    "nats": nats_transport,
    "tcp": tcp_transport,
}

PROXIED_REQUEST_TRANSPORTS: dict[str, Callable[[], Awaitable[RequestTransportSetup]]] = {
    "http": proxied_http_transport,
    "nats": proxied_nats_transport,
    "tcp": proxied_tcp_transport,
}
"""Those that can lose their network: each with a proxy between its ends, and short timeouts."""
