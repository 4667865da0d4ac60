"""Connections of an HTTP listener between processes, and those not yet authenticated."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvrouter.core.clock import AwakeClock
from kvrouter.transports.listener import UnauthenticatedConnections

CONNECTIONS_MAX = 20_000
"""Connections of one listener that showed the token."""

IDLE_S = 75.0
"""How long a connection is kept from one request to the next; routers close theirs sooner."""


class HttpConnections(web.Server):
    """Every connection of a listener. One is unauthenticated until :meth:`admit`: of those there are
    ``unauthenticated_max``, and the oldest is dropped for a new one.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        connections_max: int,
        unauthenticated_max: int,
        on_dropped: Callable[[str], None],
        clock: AwakeClock,
    ) -> None:
        super().__init__(
            handler, handler_cancellation=True, access_log=None, lingering_time=0.0, keepalive_timeout=IDLE_S
        )
        self._connections_max = connections_max
        self._clock = clock
        self._unauthenticated: UnauthenticatedConnections[web.RequestHandler] = UnauthenticatedConnections(
            _abort, at_most=unauthenticated_max, on_dropped=on_dropped
        )
        self._known: set[web.RequestHandler] = set()
        self._is_closed = False

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Keep it for a while, unless the listener was closed meanwhile."""
        super().connection_made(handler, transport)
        if self._is_closed:
            transport.abort()
            return
        self._unauthenticated.add(handler, now_s=self._clock.now_s)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget it."""
        super().connection_lost(handler, exc)
        self._unauthenticated.discard(handler)
        self._known.discard(handler)

    def admit(self, handler: web.RequestHandler) -> bool:
        """A request on the connection showed the token; return whether there is a place for it."""
        if handler in self._known:
            return True
        if len(self._known) >= self._connections_max:
            return False
        self._unauthenticated.discard(handler)
        self._known.add(handler)
        return True

    def close_unauthenticated(self, since_s: float) -> None:
        """Close the unauthenticated connections that were made before ``since_s``."""
        for connection in self._unauthenticated.older_than(since_s):
            connection.force_close()

    def take_no_more(self) -> None:
        """Abort whatever is connected from now on."""
        self._is_closed = True


def last_answer(response: web.Response) -> web.Response:
    """Return ``response``, which ends its connection: what follows there is never read."""
    response.force_close()
    return response


def service_unavailable(content_type: str, body: bytes) -> bytes:
    """Return a whole answer with the status 503, for a connection that no server can take."""
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
