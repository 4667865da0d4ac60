"""An engine for gateways: enough of OpenAI's chat route, one token for every open stream at each tick."""

import asyncio
import json
from typing import cast

from kvrouter.text.model import mock_words

_WORDS = mock_words()
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Backend:
    """Listens on a port of its own; ticks while streams are open."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._streams: dict[_Connection, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None

    async def serve(self) -> int:
        """Begin to listen; return the port."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no longer."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()

    def begin(self, connection: "_Connection", max_tokens: int) -> None:
        """A stream begins; its first token goes out at once."""
        self._streams[connection] = max_tokens
        connection.write(_HEAD)
        self._bring(connection)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + self._tick_s, self._tick)

    def end(self, connection: "_Connection") -> None:
        """A connection is gone."""
        self._streams.pop(connection, None)

    def _tick(self) -> None:
        for connection in tuple(self._streams):
            self._bring(connection)
        self._timer = None
        if self._streams:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + self._tick_s, self._tick)

    def _bring(self, connection: "_Connection") -> None:
        left = self._streams[connection] = self._streams[connection] - 1
        event = _event(" " + _WORDS[left % len(_WORDS)], "length" if left <= 0 else None)
        if left <= 0:
            del self._streams[connection]
            connection.write(_chunk(event) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            connection.write(_chunk(event))


class _Connection(asyncio.Protocol):
    """One request at a time, whatever its path."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator or len(rest) < _body_bytes(head):
            return
        body, self._received = rest[: _body_bytes(head)], rest[_body_bytes(head) :]
        asked = json.loads(body) if body else {}
        if asked.get("stream"):
            # Gateways pass the limit on under its older or its newer name.
            limit = asked["max_tokens"] if "max_tokens" in asked else asked["max_completion_tokens"]
            self._backend.begin(self, int(limit))
        else:
            self.write(_whole(b"/v1/models" in head))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._backend.end(self)

    def write(self, data: bytes) -> None:
        """Send bytes, unless the other end has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _body_bytes(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _whole(is_models: bool) -> bytes:
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer: dict[str, object] = {"id": "a", "object": "chat.completion", "created": 1, "model": "mock"}
    answer |= {"choices": [choice], "usage": usage}
    if is_models:
        answer = {
            "object": "list",
            "data": [{"id": "mock", "object": "model", "created": 1, "owned_by": "b"}],
        }
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _event(text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    event = {"id": "chatcmpl-1", "created": 1, "model": "mock", "object": "chat.completion.chunk"}
    return b"data: " + json.dumps({**event, "choices": [choice]}).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
