"""Inflates compressed request bodies within limits of length and memory."""

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvrouter.core.errors import BodyTooLarge, InvalidRequest, Unavailable
from kvrouter.frontend.http import UPLOADS_FULL, BodyLimit, Handler, Request, Responder

GZIP_WBITS = 16 + zlib.MAX_WBITS
"""zlib's ``wbits`` for the gzip format with any window."""

ENCODINGS = frozenset({"gzip", "x-gzip"})

Result = TypeVar("Result")

ON_LOOP_BYTES = 64 * 1024
"""A body that inflates to more is inflated in a thread: it may become a thousand times as long."""

THREADS = 2
"""Threads that inflate; also the most inflated bodies that no budget counts yet."""

USUAL_EXPANSION = 16
"""The usual expansion of JSON and text; the bytes beyond it are called extra."""

EXTRA_BYTES_MAX = 24 * 1024 * 1024
"""The extra bytes of all bodies, counted until the end of their answers. Engines are sent copies, so the
process may hold several times as much.
"""

COUNTED_BYTES = 256 * 1024
"""The size of the pieces in which a body's inflated length is counted before it is inflated."""


class UnsupportedEncoding(InvalidRequest):
    """The body has a content encoding other than gzip."""

    status_hint = 415
    code = "unsupported_encoding"


class InflatedFull(Unavailable):
    """The budget of inflated bodies is used up."""

    code = UPLOADS_FULL


class CompressedBodies:
    """Inflates bodies before their handler gets them. Together they hold at most ``bytes_max`` until they are
    read, and :data:`EXTRA_BYTES_MAX` extra bytes until they are answered, so that small requests cannot fill
    the memory. :meth:`close` ends its threads.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvrouter-inflate")
        self.bytes = 0
        """Bytes of inflated bodies that are not read yet."""
        self.extra_bytes = 0
        """Extra bytes of bodies that are not answered yet."""

    async def handle(
        self, encoding: str, limit: BodyLimit, request: Request, responder: Responder, handler: Handler
    ) -> None:
        """Call ``handler`` with the inflated request.

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
        """Return the inflated body, and its extra bytes, which are taken from the budget."""
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
        """End the threads; cancel queued inflations."""
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
    """Return the inflated length of ``data``, counted piece by piece; raise :class:`BodyTooLarge`. For
    invalid gzip it is the length up to the error.
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
    """Return the inflated ``data``, never holding more than ``limit`` allows.

    Raises :class:`InvalidRequest` for invalid or incomplete gzip, :class:`BodyTooLarge`.
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
