"""The frames of the tcp request plane: a length, a kind, and a msgpack body; see ``docs/wire.md``.

::

    length of the body (4 bytes, little-endian)   kind (1 byte)   body

Nothing here knows a socket: bytes in, frames out.
"""

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Annotated, TypeVar

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.planes.requests.wire import (
    CHUNKS_MAX_BYTES,
    REQUEST_MAX_BYTES,
    encode_chunk,
    encode_request,
    refusal_of,
    weight_of,
)

T = TypeVar("T")

HEADER = Struct("<IB")
HEADER_BYTES = HEADER.size

REASON_MAX_CHARS = 512
MESSAGE_MAX_CHARS = 8192
"""An error's words are cut here: a worker may quote what it was sent."""

CHUNKS_FLUSH_TOKENS = 65_536
"""A frame of chunks is closed when it holds so many tokens, far below :data:`CHUNKS_MAX_BYTES`."""

CHUNK_MAX_BYTES = CHUNKS_MAX_BYTES // 4
"""The largest chunk with more than tokens in it, as one that ends a prefill leg."""


class Kind(IntEnum):
    """What a frame is. Each direction has its own, beside the four of both."""

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


GREETED: Mapping[int, int] = {Kind.WELCOME: 32, Kind.GOODBYE: 4 * REASON_MAX_CHARS}
"""The largest body in bytes of each kind that a router reads before it was welcomed."""

TO_ROUTER: Mapping[int, int] = {
    Kind.PING: 0,
    Kind.PONG: 0,
    Kind.GOODBYE: 4 * REASON_MAX_CHARS,
    Kind.ACCEPTED: 16,
    Kind.REFUSED: 64 * 1024,
    Kind.CHUNKS: CHUNKS_MAX_BYTES,
    Kind.FAILED: 64 * 1024,
}
"""The largest body in bytes of each kind that a router reads."""

TO_WORKER: Mapping[int, int] = {
    Kind.PING: 0,
    Kind.PONG: 0,
    Kind.GOODBYE: 4 * REASON_MAX_CHARS,
    Kind.OPEN: REQUEST_MAX_BYTES + 64,
    Kind.CREDIT: 1024 * 1024,
    Kind.CANCEL: 4 * REASON_MAX_CHARS + 64,
}
"""The largest body in bytes of each kind that a worker reads."""

StreamId = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Item = tuple[int, tuple[int, ...], msgspec.Raw | None]
"""What one stream brings in a frame of chunks: bare tokens, or a whole chunk and no tokens beside it."""

ReadItem = tuple[StreamId, tuple[Tokens, ...], EngineChunk | None]


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A leg for the worker, and how many tokens of it the router takes before it gives more credit."""

    stream_id: StreamId
    credit_tokens: Tokens
    request: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    """The router wants no more of a stream."""

    stream_id: StreamId
    reason: str


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The worker did not take the leg, or failed it: an error as ``wire.Refusal`` has it."""

    stream_id: StreamId
    code: str
    message: str
    param: str | None = None


class FrameReader:
    """Cuts bytes into frames. ``kinds`` is the largest body in bytes of each kind that may come."""

    def __init__(self, kinds: Mapping[int, int]) -> None:
        self.kinds = kinds
        self._rest = bytearray()
        self._need_bytes = HEADER_BYTES

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that are complete now; raise ProtocolError before an oversized one is kept."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need_bytes:
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
        if at < end:
            self._rest += data[at:]
        return frames

    def _refused(self, kind: int, body_bytes: int) -> ProtocolError:
        limit_bytes = self.kinds.get(kind)
        if limit_bytes is None:
            return ProtocolError(f"a frame of kind {kind} may not come here", param="kind")
        name = Kind(kind).name
        return ProtocolError(
            f"a {name} frame of {body_bytes} bytes is over the {limit_bytes} allowed", param="length"
        )


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """Return a frame."""
    return HEADER.pack(len(body), kind) + body


def goodbye(reason: str) -> bytes:
    """Return the frame that says why the connection ends."""
    return frame(Kind.GOODBYE, reason[:REASON_MAX_CHARS].encode("utf-8", "replace"))


def encode_open(stream_id: int, credit_tokens: int, request: EngineRequest) -> bytes:
    """Return the body of an OPEN frame."""
    return _encoder.encode(Open(stream_id, credit_tokens, msgspec.Raw(encode_request(request))))


def encode_cancel(stream_id: int, reason: str) -> bytes:
    """Return the body of a CANCEL frame."""
    return _encoder.encode(Cancel(stream_id, reason[:REASON_MAX_CHARS]))


def encode_refused(stream_id: int, error: Exception) -> bytes:
    """Return the body of a REFUSED or FAILED frame."""
    refusal = refusal_of(error)
    return _encoder.encode(
        Refused(stream_id, refusal.code, refusal.message[:MESSAGE_MAX_CHARS], refusal.param)
    )


def encode_number(number: int) -> bytes:
    """Return the body of an ACCEPTED frame."""
    return _encoder.encode(number)


def encode_credits(credits_tokens: Mapping[int, int]) -> bytes:
    """Return the body of a CREDIT frame: tokens by stream."""
    return _encoder.encode(list(credits_tokens.items()))


def encode_items(items: list[Item]) -> bytes:
    """Return the body of a CHUNKS frame."""
    return _encoder.encode(items)


def credit_of(chunk: EngineChunk) -> int:
    """Return the tokens of credit that ``chunk`` takes: a last one that brings nothing takes none."""
    if chunk.finish is not None and not chunk.token_ids and not chunk.raw:
        return 0
    return weight_of(chunk)


def whole_chunk(chunk: EngineChunk) -> bytes:
    """Return a chunk with more than tokens in it as it travels; raise ProtocolError when it is too large."""
    body = encode_chunk(chunk)
    if len(body) > CHUNK_MAX_BYTES:
        raise ProtocolError(
            f"a chunk of {len(body)} bytes is over the {CHUNK_MAX_BYTES} allowed", param="chunk"
        )
    return body


def decode(decoder: "msgspec.msgpack.Decoder[T]", body: bytes, what: str) -> T:
    """Return what ``body`` holds; raise ProtocolError."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{what}: {error}", param=what) from error


_encoder = msgspec.msgpack.Encoder()
open_decoder = msgspec.msgpack.Decoder(Open)
cancel_decoder = msgspec.msgpack.Decoder(Cancel)
refused_decoder = msgspec.msgpack.Decoder(Refused)
number_decoder = msgspec.msgpack.Decoder(StreamId)
credits_decoder = msgspec.msgpack.Decoder(list[tuple[StreamId, Tokens]])
items_decoder = msgspec.msgpack.Decoder(list[ReadItem])
