"""The wires that the request plane's contract runs over: a name, and what brings one up for one test."""

from collections.abc import Awaitable, Callable

from tests.support.wire import Wire
from tests.support.wires_http import http_wire
from tests.support.wires_memory import memory_wire
from tests.support.wires_tcp import tcp_wire

__all__ = ["WIRES", "Wire"]

WIRES: dict[str, Callable[[], Awaitable[Wire]]] = {
    "http": http_wire,
    "memory": memory_wire,
    "tcp": tcp_wire,
}
