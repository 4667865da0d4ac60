"""Bodies that came compressed, inflated within bounds."""

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvrouter.core.errors import BodyTooLarge, InvalidRequest, Unavailable
from kvrouter.frontend.http import UPLOADS_FULL, BodyLimit, Handler, Request, Responder

GZIP_WBITS = 16 + zlib.MAX_WBITS
"""What zlib calls gzip's format with any window."""

ENCODINGS = frozenset({"gzip", "x-gzip"})

Result = TypeVar("Result")

ON_LOOP_BYTES = 64 * 1024
"""So much is inflated at once; what becomes more is inflated in a thread. A thousand times as many bytes may
come of a body as it has.
"""

THREADS = 2
"""So many bodies are inflated at a time, and no more of them are held that are in no budget yet."""

USUAL_EXPANSION = 16
"""JSON and text become up to so many times as long as they came; what they become beyond that is extra."""

EXTRA_BYTES_MAX = 24 * 1024 * 1024
"""What all bodies together hold that is extra, from their inflation to the end of their answer. Engines are
sent copies of it, so this process may hold several times as much.
"""

COUNTED_BYTES = 256 * 1024
"""A body's length is counted in pieces of so many bytes, before the whole of it is held."""


class UnsupportedEncoding(InvalidRequest):
    """A body came in a coding that is not understood here."""

    status_hint = 415
    code = "unsupported_encoding"


class InflatedFull(Unavailable):
    """Inflated bodies that are being read hold as much as they may."""

    code = UPLOADS_FULL


class CompressedBodies:
    """Inflates bodies before their handler sees them. Until they are read they hold at most ``bytes_max``
    together, and of what is extra :data:`EXTRA_BYTES_MAX` until they are answered: so little that is sent
    cannot become much for long. :meth:`close` ends its threads.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvrouter-inflate")
        self.bytes = 0
        """What inflated bodies hold now that are being read."""
        self.extra_bytes = 0
        """What is extra of bodies that are not answered yet."""

    async def handle(
        self, encoding: str, limit: BodyLimit, request: Request, responder: Responder, handler: Handler
    ) -> None:
        """Give ``handler`` the request as it was before its client compressed it.

        Raises :class:`UnsupportedEncoding`, :class:`InvalidRequest`, :class:`BodyTooLarge` and
        :class:`InflatedFull`.
        """
        if encoding.strip().lower() not in ENCODINGS:
            raise UnsupportedEncoding(
                "content-encoding: gzip is understood, and a body without any", param="content-encoding"
            )
        body, extra_bytes = await self._inflated(request.take_body(), limit)
        try:
            await self._handle_inflated(body, request, responder, handler)
        finally:
            self.extra_bytes -= extra_bytes

    async def _inflated(self, data: bytes, limit: BodyLimit) -> tuple[bytes, int]:
        """Return a body, and how many of its bytes are extra: those are held in the budget."""
        try:
            return inflated(data, BodyLimit(min(ON_LOOP_BYTES, limit.max_bytes), limit.why)), 0
        except BodyTooLarge:
            if limit.max_bytes <= ON_LOOP_BYTES:
                raise
        n_bytes = await self._in_thread(inflated_bytes, data, limit)
        extra_bytes = max(0, n_bytes - USUAL_EXPANSION * len(data))
        self._take_extra(extra_bytes, n_bytes)
        try:
            return await self._in_thread(inflated, data, limit), extra_bytes
        except BaseException:
            self.extra_bytes -= extra_bytes
            raise

    async def _handle_inflated(
        self, body: bytes, request: Request, responder: Responder, handler: Handler
    ) -> None:
        n_bytes = len(body)
        if self.bytes + n_bytes > self._bytes_max:
            raise InflatedFull("too many bytes of compressed requests are being read")
        self.bytes += n_bytes

        def release() -> None:
            self.bytes -= n_bytes
            request.on_read = None

        request.body, request.on_read = body, release
        try:
            await handler(request, responder)
        finally:
            request.read()

    def close(self) -> None:
        """Inflate no more bodies."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _take_extra(self, extra_bytes: int, n_bytes: int) -> None:
        if extra_bytes > EXTRA_BYTES_MAX:
            raise BodyTooLarge(
                f"the body inflates to {n_bytes} bytes, over {USUAL_EXPANSION} times what was sent and "
                f"{EXTRA_BYTES_MAX} bytes: send it without compression"
            )
        if self.extra_bytes + extra_bytes > EXTRA_BYTES_MAX:
            raise InflatedFull("too many bytes of compressed requests wait for their answers")
        self.extra_bytes += extra_bytes

    async def _in_thread(
        self, inflate: Callable[[bytes, BodyLimit], Result], data: bytes, limit: BodyLimit
    ) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, inflate, data, limit)


def inflated_bytes(data: bytes, limit: BodyLimit) -> int:
    """Return how long ``data`` becomes, without holding more than a piece of it; raise :class:`BodyTooLarge`.
    What is no gzip has the length at which that shows.
    """
    inflating, n_bytes = zlib.decompressobj(GZIP_WBITS), 0
    try:
        for begin in range(0, len(data), COUNTED_BYTES):
            n_bytes += len(inflating.decompress(data[begin : begin + COUNTED_BYTES], COUNTED_BYTES))
            while inflating.unconsumed_tail and n_bytes <= limit.max_bytes:
                n_bytes += len(inflating.decompress(inflating.unconsumed_tail, COUNTED_BYTES))
            if n_bytes > limit.max_bytes:
                raise _too_large(limit)
    except zlib.error:
        return n_bytes
    return n_bytes


def inflated(data: bytes, limit: BodyLimit) -> bytes:
    """Return what was compressed; no more than ``limit`` allows is ever held.

    Raises :class:`InvalidRequest` for what is not gzip, or not all of it, :class:`BodyTooLarge`.
    """
    inflating = zlib.decompressobj(GZIP_WBITS)
    try:
        body = inflating.decompress(data, limit.max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not gzip, as content-encoding says: {error}") from None
    if len(body) > limit.max_bytes:
        raise _too_large(limit)
    if not inflating.eof or inflating.unused_data:
        raise InvalidRequest("the body is not one whole gzip stream, as content-encoding says")
    return body


def _too_large(limit: BodyLimit) -> BodyTooLarge:
    return BodyTooLarge(f"the body inflates to more than {limit.max_bytes} bytes, {limit.why}")
