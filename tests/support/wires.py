"""The wires that the request plane's contract runs over: a name, and what brings one up for one test."""

from collections.abc import Awaitable, Callable

from tests.support.wire import Wire
from tests.support.wires_http import http_wire, http_wire_with_network
from tests.support.wires_memory import memory_wire
from tests.support.wires_nats import nats_wire, nats_wire_with_network
from tests.support.wires_tcp import tcp_wire, tcp_wire_with_network

__all__ = ["WIRES", "WIRES_WITH_NETWORK", "Wire"]

WIRES: dict[str, Callable[[], Awaitable[Wire]]] = {
    "http": http_wire,
    "memory": memory_wire,
    "nats": nats_wire,
    "tcp": tcp_wire,
}

WIRES_WITH_NETWORK: dict[str, Callable[[], Awaitable[Wire]]] = {
    "http": http_wire_with_network,
    "nats": nats_wire_with_network,
    "tcp": tcp_wire_with_network,
}
"""Those that can lose their network: each with a proxy between its ends, and short timeouts."""
