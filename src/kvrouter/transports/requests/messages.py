"""The messages of one session, in bytes: length, kind, msgpack; and its hello. See ``docs/wire.md``.

::

    length of the body (4 bytes, little-endian)   kind (1 byte)   body

Every pipe between a router and a worker carries these: bytes in, frames out.

Over a pipe of bytes the worker's end speaks first (a greeting with a nonce), the router's end answers (a
hello with a nonce of its own, the worker it wants, and a proof of the shared token), and the worker's end
welcomes it with a proof of its own. The token itself never travels, and what was overheard proves nothing
on another connection. All of it has a fixed form: nothing of a stranger is parsed. A pipe that authenticates
every message needs no hello.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Annotated, TypeVar

import msgspec

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.json import unpacked
from kvrouter.core.requests import EngineChunk
from kvrouter.transports.requests.stream import (
    CHUNKS_MAX_BYTES,
    REQUEST_MAX_BYTES,
    VERSION,
    encode_chunk,
    refusal_of,
)

T = TypeVar("T")

HEADER = Struct("<IB")
HEADER_BYTES = HEADER.size

REASON_MAX_CHARS = 512
MESSAGE_MAX_CHARS = 8192
"""An error's words are cut here: a worker may quote what it was sent."""

CHUNKS_FLUSH_TOKENS = 65_536
"""A frame of chunks is closed when it holds so many tokens, far below :data:`CHUNKS_MAX_BYTES`."""

ITEM_TOKENS = 64
"""What an item counts in addition to its tokens towards a full frame."""

CHUNK_MAX_BYTES = CHUNKS_MAX_BYTES // 4
"""The largest chunk with more than tokens in it, as one that ends a prefill leg."""


class FrameKind(IntEnum):
    """What a frame is. Each direction has its own, in addition to the four of both."""

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
"""The largest body in bytes of each kind that a router reads before it was welcomed."""

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
"""What one stream brings in a frame of chunks: bare tokens, or a whole chunk and no tokens with it."""

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
    """The worker did not take the leg, or failed it: an error as ``stream.WireError`` has it."""

    stream_id: StreamId
    code: str
    message: str
    param: str | None = None
    answer: EngineAnswer | None = None


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

    @property
    def held_bytes(self) -> int:
        """How many bytes came of a frame that is not complete."""
        return len(self._rest)

    def drop(self) -> None:
        """Free what is held: nothing more is read."""
        self._rest = bytearray()

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
    """Return the frame that says why the connection ends."""
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


def encode_number(number: int) -> bytes:
    """Return the body of an ACCEPTED frame."""
    return encoder.encode(number)


def encode_credits(credits_tokens: Mapping[int, int]) -> bytes:
    """Return the body of a CREDIT frame: tokens by stream."""
    return encoder.encode(list(credits_tokens.items()))


def encode_items(items: list[Item]) -> bytes:
    """Return the body of a CHUNKS frame."""
    return encoder.encode(items)


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
    return unpacked(decoder, body, what)


encoder = msgspec.msgpack.Encoder()
open_decoder = msgspec.msgpack.Decoder(Open)
cancel_decoder = msgspec.msgpack.Decoder(Cancel)
refused_decoder = msgspec.msgpack.Decoder(Refused)
number_decoder = msgspec.msgpack.Decoder(StreamId)
credits_decoder = msgspec.msgpack.Decoder(list[tuple[StreamId, Tokens]])
items_decoder = msgspec.msgpack.Decoder(list[ReadItem])


MAGIC = b"kvrouter"
NONCE_BYTES = 16

_OPENING = Struct("<8sH")
_GREETING = Struct("<8sH16s")
_HELLO = Struct("<8sH16sQQ32s")
_NAMES = Struct("<QQ")

GREETING_BYTES = _GREETING.size
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True)
class Hello:
    """What a router's end says: whom it wants, and the proof that it may."""

    nonce: bytes
    worker_id: WorkerId
    incarnation: Epoch
    proof: bytes


class Secret:
    """The shared token. Without one, any peer that speaks the protocol is accepted."""

    def __init__(self, token: str | None) -> None:
        self._key = b"" if token is None else token.encode()

    def router_proof(self, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
        """Return what only a router with the token can say on this connection."""
        said = b"router" + worker_nonce + nonce + _NAMES.pack(worker_id, incarnation)
        return hmac.digest(self._key, said, "sha256")

    def worker_proof(self, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
        """Return what only a worker with the token can say on this connection."""
        said = b"worker" + worker_nonce + nonce + _NAMES.pack(worker_id, incarnation)
        return hmac.digest(self._key, said, "sha256")


def greeting(worker_nonce: bytes) -> bytes:
    """Return the first bytes of a worker's end."""
    return _GREETING.pack(MAGIC, VERSION, worker_nonce)


def read_greeting(data: bytes | bytearray) -> bytes | None:
    """Return the nonce of the worker's end, None while bytes are missing; raise ProtocolError."""
    _check_opening(data)
    if len(data) < GREETING_BYTES:
        return None
    nonce: bytes = _GREETING.unpack_from(data)[2]
    return nonce


def hello(secret: Secret, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
    """Return the first bytes of a router's end."""
    proof = secret.router_proof(worker_nonce, nonce, worker_id, incarnation)
    return _HELLO.pack(MAGIC, VERSION, nonce, worker_id, incarnation, proof)


def read_hello(data: bytes | bytearray) -> Hello | None:
    """Return what the router's end says, None while bytes are missing; raise ProtocolError."""
    _check_opening(data)
    if len(data) < HELLO_BYTES:
        return None
    _, _, nonce, worker_id, incarnation, proof = _HELLO.unpack_from(data)
    return Hello(nonce, WorkerId(worker_id), Epoch(incarnation), proof)


def _check_opening(data: bytes | bytearray) -> None:
    """Refuse another protocol by its first byte, another version as soon as it is read."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ProtocolError("the peer does not speak kvrouter's protocol", param="magic")
    if len(data) >= _OPENING.size:
        version = _OPENING.unpack_from(data)[1]
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version}, not {VERSION}", param="version")
