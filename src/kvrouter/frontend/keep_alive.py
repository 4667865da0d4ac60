"""Comments that keep a client's event stream alive while nothing else is written to it."""

import asyncio
import re
from collections.abc import Callable

from kvrouter.frontend.http import Stream
from kvrouter.frontend.http.response import ResponseHeaders

SSE_KEEP_ALIVE = b": keep-alive\n\n"
"""The same comment as vLLM's."""

_BETWEEN_EVENTS = re.compile(rb"(?:\n\n|\n\r\n?|\r\r\n?)\Z")

_TAIL_BYTES = 4


class KeepAliveStream:
    """A :class:`Stream` that gets a comment whenever nothing was written for ``interval_s``. The first
    comment or :meth:`begin` starts the stream, by calling the ``begin`` argument.
    """

    def __init__(self, begin: Callable[[ResponseHeaders], Stream], interval_s: float) -> None:
        self._begin = begin
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._tail = b""
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(interval_s, self._check)

    @property
    def has_begun(self) -> bool:
        """Whether the stream has started, so that the client has a status."""
        return self._stream is not None

    def begin(self, headers: ResponseHeaders = ()) -> None:
        """Start the stream unless a comment did; ``headers`` are the engine's."""
        if self._stream is None:
            self._stream = self._begin(headers)

    @property
    def ready(self) -> bool:
        """Whether output may be written; see :attr:`Stream.ready`."""
        return self._begun.ready

    async def wait_ready(self) -> None:
        """As :meth:`Stream.wait_ready`."""
        await self._begun.wait_ready()

    def write(self, data: bytes) -> None:
        """Add to the body, as :meth:`Stream.write` does."""
        if data:
            self._tail = data[-_TAIL_BYTES:]
            self._written_s = self._loop.time()
            self._begun.write(data)

    def end(self) -> None:
        """The body is complete."""
        self.stop()
        self._begun.end()

    def stop(self) -> None:
        """Write no further comments. Idempotent."""
        self._timer.cancel()

    @property
    def _begun(self) -> Stream:
        if self._stream is None:
            raise RuntimeError("a stream was written to before it had begun")
        return self._stream

    def _check(self) -> None:
        due_s = self._written_s + self._interval_s
        if self._loop.time() >= due_s:
            due_s = self._loop.time() + self._interval_s
            self._comment()
        self._timer = self._loop.call_at(due_s, self._check)

    def _comment(self) -> None:
        """Write a comment, unless inside an event or to a client that does not read."""
        self.begin()
        if self.ready and (not self._tail or _BETWEEN_EVENTS.search(self._tail)):
            self.write(SSE_KEEP_ALIVE)
