"""Bodies that came compressed, inflated within bounds."""

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor

from kvrouter.core.errors import BodyTooLarge, InvalidRequest, Unavailable
from kvrouter.frontend.http import UPLOADS_FULL, BodyLimit, Handler, Request, Responder

GZIP_WBITS = 16 + zlib.MAX_WBITS
"""What zlib calls gzip's format with any window."""

ENCODINGS = frozenset({"gzip", "x-gzip"})

ON_LOOP_BYTES = 64 * 1024
"""So much is inflated at once; what becomes more is inflated in a thread. A thousand times as many bytes may
come of a body as it has.
"""

THREADS = 2
"""So many bodies are inflated at a time, and no more of them are held that are in no budget yet."""


class UnsupportedEncoding(InvalidRequest):
    """A body came in a coding that is not understood here."""

    status_hint = 415
    code = "unsupported_encoding"


class InflatedFull(Unavailable):
    """Inflated bodies that are being read hold as much as they may."""

    code = UPLOADS_FULL


class CompressedBodies:
    """Inflates bodies before their handler sees them. Until they are read they hold at most ``bytes_max``
    together; :meth:`close` ends its threads.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvrouter-inflate")
        self.bytes = 0
        """What inflated bodies hold now that are being read."""

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
        body = await self._inflated(request.take_body(), limit)
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

    async def _inflated(self, data: bytes, limit: BodyLimit) -> bytes:
        try:
            return inflated(data, BodyLimit(min(ON_LOOP_BYTES, limit.max_bytes), limit.why))
        except BodyTooLarge:
            if limit.max_bytes <= ON_LOOP_BYTES:
                raise
        return await asyncio.get_running_loop().run_in_executor(self._threads, inflated, data, limit)


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
        raise BodyTooLarge(f"the body inflates to more than {limit.max_bytes} bytes, {limit.why}")
    if not inflating.eof or inflating.unused_data:
        raise InvalidRequest("the body is not one whole gzip stream, as content-encoding says")
    return body
