"""Bodies that came compressed, inflated within bounds."""

import asyncio
import zlib

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import BodyTooLarge, InvalidRequest, Unavailable
from kvrouter.frontend.http import UPLOADS_FULL, BodyLimit, Handler, Request, Responder

GZIP_WBITS = 16 + zlib.MAX_WBITS
"""What zlib calls gzip's format with any window."""

ENCODINGS = frozenset({"gzip", "x-gzip"})

OFF_LOOP_BYTES = 32 * 1024
"""A longer body is inflated in a thread: a thousand times as many bytes may come of it."""


class UnsupportedEncoding(InvalidRequest):
    """A body came in a coding that is not understood here."""

    status_hint = 415
    code = "unsupported_encoding"


class InflatedFull(Unavailable):
    """What inflated bodies hold together is as much as they may, and this one held most."""

    code = UPLOADS_FULL


class CompressedBodies:
    """Inflates bodies before their handler sees them. What they hold together, until their answer begins, is
    in a budget of ``bytes_max``: one that is full sheds the largest.
    """

    def __init__(self, bytes_max: int) -> None:
        self._budget = ByteBudget(bytes_max)

    @property
    def bytes(self) -> int:
        """What inflated bodies hold now."""
        return self._budget.bytes

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
        held = _Held()
        data = request.take_body()
        try:
            if len(data) > OFF_LOOP_BYTES:
                request.body = await asyncio.to_thread(inflated, data, limit)
            else:
                request.body = inflated(data, limit)
            self._budget.hold(held, len(request.body))
            responder.on_start = lambda: self._budget.hold(held, 0)
            await handler(request, responder)
        except asyncio.CancelledError:
            if not held.is_shed:
                raise
            raise InflatedFull("too many bytes of compressed requests are being read") from None
        finally:
            self._budget.hold(held, 0)


class _Held:
    """One inflated body, and the task that handles it."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.is_shed = False

    def shed(self) -> None:
        """End its handling: its answer has not begun."""
        self.is_shed = True
        if self._task is not None:
            self._task.cancel()


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
