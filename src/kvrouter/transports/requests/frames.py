"""The binary messages of one session: length, kind, msgpack. See ``docs/wire.md``.

::

    length of the body (4 bytes, little-endian)   kind (1 byte)   body

Every pipe between a router and a worker, over tcp and NATS, carries these frames; ``http/frames.py`` has
those of http.
"""

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Annotated

import msgspec

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import ProtocolError
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.transports.requests.encoding import (
    CHUNKS_MAX_BYTES,
    REQUEST_MAX_BYTES,
    encode_chunk,
    refusal_of,
    unpack_tokens,
)

HEADER = Struct("<IB")
HEADER_BYTES = HEADER.size

REASON_MAX_CHARS = 512
MESSAGE_MAX_CHARS = 8192
"""Longer error messages are cut: a worker may quote its input."""

CHUNKS_FLUSH_TOKENS = 65_536
"""A frame of chunks is closed at this many tokens, far below :data:`CHUNKS_MAX_BYTES`."""

ITEM_TOKENS = 64
"""Tokens that each item adds to the fill of a frame, on top of its own."""

CHUNK_MAX_BYTES = CHUNKS_MAX_BYTES // 4
"""The largest chunk that is not bare tokens, such as the last one of a prefill leg."""


class FrameKind(IntEnum):
    """The kind of a frame. The first four go both ways, the 16s to the worker, the 32s to the router."""

    PING = 1
    PONG = 2
    GOODBYE = 3
    WELCOME = 4
    OPEN = 16
    CREDIT = 17
    CANCEL = 18
    ACCEPTED = 32
    REFUSED = 33
    CHUNKS = 34
    FAILED = 35


GREETED: Mapping[int, int] = {
    FrameKind.PING: 0,
    FrameKind.PONG: 0,
    FrameKind.WELCOME: 32,
    FrameKind.GOODBYE: 4 * REASON_MAX_CHARS,
}
"""The largest body in bytes of each kind that a router reads before WELCOME."""

TO_ROUTER: Mapping[int, int] = {
    FrameKind.PING: 0,
    FrameKind.PONG: 0,
    FrameKind.GOODBYE: 4 * REASON_MAX_CHARS,
    FrameKind.ACCEPTED: 16,
    FrameKind.REFUSED: 64 * 1024,
    FrameKind.CHUNKS: CHUNKS_MAX_BYTES,
    FrameKind.FAILED: 64 * 1024,
}
"""The largest body in bytes of each kind that a router reads."""

TO_WORKER: Mapping[int, int] = {
    FrameKind.PING: 0,
    FrameKind.PONG: 0,
    FrameKind.GOODBYE: 4 * REASON_MAX_CHARS,
    FrameKind.OPEN: REQUEST_MAX_BYTES + 64,
    FrameKind.CREDIT: 1024 * 1024,
    FrameKind.CANCEL: 4 * REASON_MAX_CHARS + 64,
}
"""The largest body in bytes of each kind that a worker reads."""

StreamId = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Item = tuple[int, tuple[int, ...], msgspec.Raw | None]
"""One stream's part of a CHUNKS frame: bare tokens, or an encoded chunk and no tokens."""

ReadItem = tuple[StreamId, tuple[Tokens, ...], EngineChunk | None]


class Open(msgspec.Struct, frozen=True, array_like=True):
    """The body of OPEN: a leg, and the tokens that the router accepts before it gives more credit."""

    stream_id: StreamId
    credit_tokens: Tokens
    request: EngineRequest


class UnreadOpen(msgspec.Struct, frozen=True, array_like=True):
    """The body of an OPEN whose request cannot be read: the worker refuses this leg alone."""

    stream_id: StreamId
    credit_tokens: Tokens
    request: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    """The body of CANCEL: the router needs no more of a stream."""

    stream_id: StreamId
    reason: str


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The body of REFUSED and FAILED: an error with the fields of ``encoding.ErrorMessage``."""

    stream_id: StreamId
    code: str
    message: str
    param: str | None = None
    answer: EngineAnswer | None = None


class FrameReader:
    """Splits bytes into frames. ``kinds`` is the largest body in bytes of each allowed kind."""

    def __init__(self, kinds: Mapping[int, int]) -> None:
        self.kinds = kinds
        self.held_bytes = 0
        """The bytes of an incomplete frame."""
        self._rest = bytearray()
        self._need_bytes = HEADER_BYTES

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the complete frames; raise ProtocolError before an oversized one is buffered."""
        if self._rest:
            self._rest += data
            self.held_bytes = len(self._rest)
            if self.held_bytes < self._need_bytes:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames = []
        at, end = 0, len(data)
        self._need_bytes = HEADER_BYTES
        while end - at >= HEADER_BYTES:
            body_bytes, kind = HEADER.unpack_from(data, at)
            if body_bytes > self.kinds.get(kind, -1):
                raise self._refused(kind, body_bytes)
            stop = at + HEADER_BYTES + body_bytes
            if stop > end:
                self._need_bytes = stop - at
                break
            frames.append((kind, data[at + HEADER_BYTES : stop]))
            at = stop
        self.held_bytes = end - at
        if at < end:
            self._rest += data[at:]
        return frames

    def drop(self) -> None:
        """Free the buffer: nothing more is read."""
        self._rest = bytearray()
        self.held_bytes = 0

    def _refused(self, kind: int, body_bytes: int) -> ProtocolError:
        limit_bytes = self.kinds.get(kind)
        if limit_bytes is None:
            return ProtocolError(f"a frame of kind {kind} may not come here", param="kind")
        name = FrameKind(kind).name
        return ProtocolError(
            f"a {name} frame of {body_bytes} bytes is over the {limit_bytes} allowed", param="length"
        )


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    """Return a frame."""
    return HEADER.pack(len(body), kind) + body


def goodbye(reason: str) -> bytes:
    """Return the frame with the reason why the connection ends."""
    return frame(FrameKind.GOODBYE, reason[:REASON_MAX_CHARS].encode("utf-8", "replace"))


def encode_cancel(stream_id: int, reason: str) -> bytes:
    """Return the body of a CANCEL frame."""
    return encoder.encode(Cancel(stream_id, reason[:REASON_MAX_CHARS]))


def encode_refused(stream_id: int, error: Exception) -> bytes:
    """Return the body of a REFUSED or FAILED frame."""
    refusal = refusal_of(error)
    param = None if refusal.param is None else refusal.param[:REASON_MAX_CHARS]
    message = refusal.message[:MESSAGE_MAX_CHARS]
    return encoder.encode(Refused(stream_id, refusal.code, message, param, refusal.answer))


def encode_credits(credits_tokens: Mapping[int, int]) -> bytes:
    """Return the body of a CREDIT frame: tokens by stream."""
    return encoder.encode(list(credits_tokens.items()))


def encode_checked_chunk(chunk: EngineChunk) -> bytes:
    """Return a chunk that is not bare tokens, encoded; raise ProtocolError when it is too large."""
    body = encode_chunk(chunk)
    if len(body) > CHUNK_MAX_BYTES:
        raise ProtocolError(
            f"a chunk of {len(body)} bytes is over the {CHUNK_MAX_BYTES} allowed", param="chunk"
        )
    return body


encoder = msgspec.msgpack.Encoder()
open_decoder = msgspec.msgpack.Decoder(Open, dec_hook=unpack_tokens)
unread_open_decoder = msgspec.msgpack.Decoder(UnreadOpen)
cancel_decoder = msgspec.msgpack.Decoder(Cancel)
refused_decoder = msgspec.msgpack.Decoder(Refused)
number_decoder = msgspec.msgpack.Decoder(StreamId)
credits_decoder = msgspec.msgpack.Decoder(list[tuple[StreamId, Tokens]])
items_decoder = msgspec.msgpack.Decoder(list[ReadItem])
