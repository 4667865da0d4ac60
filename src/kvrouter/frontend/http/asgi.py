"""A bridge that serves an ASGI app (Starlette) on the server's connections.

Bodies are whole in both directions. Websockets are not served; lifespan is the caller's.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from kvrouter.frontend.http.response import Request, Responder

__all__ = ["AsgiApp", "AsgiBridge"]

# ASGI's own types: a message's values depend on its "type", which no Python type says.
_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

# The server frames the answer itself, from the whole body.
_FRAMING = frozenset({b"connection", b"content-length", b"date", b"transfer-encoding", b"keep-alive"})


class _Exchange:
    """One request and its answer, as the app's ``receive`` and ``send``."""

    def __init__(self, request: Request, responder: Responder, answer_bytes_max: int) -> None:
        self._request = request
        self._responder = responder
        self._answer_bytes_max = answer_bytes_max
        self._received = False
        self._over = asyncio.Event()
        responder.on_disconnect(lambda _: self._over.set())
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    async def receive(self) -> _Message:
        """The request's body once; after that, the end of the answer or of the client's patience."""
        if not self._received:
            self._received = True
            return {"type": "http.request", "body": self._request.take_body(), "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: _Message) -> None:
        """Collects the answer, and sends it with its last part."""
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            headers = message.get("headers", ())
            self._headers = [(bytes(k), bytes(v)) for k, v in headers if bytes(k).lower() not in _FRAMING]
            return
        if message["type"] != "http.response.body" or not self._status:
            raise RuntimeError(f"not an ASGI message that is due: {message['type']!r}")
        self._body += message.get("body", b"")
        if len(self._body) > self._answer_bytes_max:
            raise RuntimeError(f"the answer is over {self._answer_bytes_max} bytes")
        if not message.get("more_body", False):
            await self._responder.send(self._status, self._headers, bytes(self._body))
            self._over.set()


class AsgiBridge:
    """A :data:`Handler` that answers through an ASGI app."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        server: tuple[str, int | None] = ("localhost", None),
        state: MutableMapping[str, object] | None = None,
        answer_bytes_max: int = 64 * 1024 * 1024,
    ) -> None:
        """``state``: the lifespan state that requests see. ``answer_bytes_max`` bounds one answer's body."""
        self._app = app
        self._server = server
        self._state = {} if state is None else state
        self._answer_bytes_max = answer_bytes_max

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Answers one request. What the app raises passes on, after its answer if it gave one."""
        exchange = _Exchange(request, responder, self._answer_bytes_max)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.head.http_version,
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.head.target,
            "query_string": request.query.encode("ascii"),
            "root_path": "",
            "headers": list(request.headers),
            "client": responder.client,
            "server": self._server,
            "state": dict(self._state),
        }
        await self._app(scope, exchange.receive, exchange.send)
