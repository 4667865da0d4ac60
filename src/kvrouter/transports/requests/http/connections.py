"""The connections of an HTTP listener between processes, unauthenticated ones included."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvrouter.core.clock import AwakeClock
from kvrouter.transports.listener import Connections, ListenerLimits

CONNECTIONS_MAX = 20_000
"""Authenticated connections of one listener."""

IDLE_S = 75.0
"""How long a connection is kept between two requests; routers close theirs sooner."""


class HttpConnections(web.Server):
    """The connections of a listener. One is unauthenticated until a request on it carries the token."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        limits: ListenerLimits,
        on_dropped: Callable[[str], None],
        clock: AwakeClock,
    ) -> None:
        super().__init__(
            handler, handler_cancellation=True, access_log=None, lingering_time=0.0, keepalive_timeout=IDLE_S
        )
        self._clock = clock
        self._hello_within_s = limits.hello_within_s
        self.open: Connections[web.RequestHandler] = Connections(_abort, limits=limits, on_dropped=on_dropped)
        self._is_closed = False

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add the connection, unless the listener was closed meanwhile."""
        super().connection_made(handler, transport)
        if self._is_closed:
            transport.abort()
            return
        self.open.add(handler, now_s=self._clock.now_s)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget the connection."""
        super().connection_lost(handler, exc)
        self.open.discard(handler)

    def close_unauthenticated(self) -> None:
        """Close the connections that took too long to show the token."""
        for connection in self.open.older_than(self._clock.now_s - self._hello_within_s):
            connection.force_close()

    def stop_accepting(self) -> None:
        """Abort every further connection."""
        self._is_closed = True


def last_answer(response: web.Response) -> web.Response:
    """Return ``response``, marked to close its connection: later requests on it are never read."""
    response.force_close()
    return response


def service_unavailable(content_type: str, body: bytes) -> bytes:
    """Return a complete response with the status 503, for a connection that cannot be served."""
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
