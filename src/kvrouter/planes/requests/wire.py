"""The binary form of requests, chunks and refusals, the same on every wire of the request plane.

Token ids travel as unsigned 32-bit little-endian integers in one run of bytes. Whatever cannot be read is a
:class:`ProtocolError` that names the field; what a reader does not know is skipped, so that fields can be
added.
"""

import sys
from array import array

import msgspec

from kvrouter.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrouterError,
    ProtocolError,
    ShuttingDown,
    UnknownModel,
)
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.planes.requests.port import LegRepeated, StreamBroken, WorkerFull, WorkerUnreachable

VERSION = 1
"""What both ends of a request plane must agree on; see ``docs/wire.md``."""

REQUEST_MAX_BYTES = 64 * 1024 * 1024
"""The largest request that a worker reads: 16 million tokens."""

CHUNKS_MAX_BYTES = 16 * 1024 * 1024
"""The largest run of chunks that a router reads in one frame."""

_KINDS: dict[str, type[KvrouterError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        ContextLengthExceeded,
        UnknownModel,
        ShuttingDown,
        DeadlineExceeded,
        ProtocolError,
        WorkerUnreachable,
        WorkerFull,
        LegRepeated,
        StreamBroken,
    )
}


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels: the stable code of its class, its words, and the field it is about."""

    code: str
    message: str
    param: str | None = None


def refusal_of(error: Exception) -> Refusal:
    """Return how ``error`` travels. One that is not of the core tree is a mistake at the worker."""
    if isinstance(error, KvrouterError) and error.code in _KINDS:
        return Refusal(error.code, error.message, error.param)
    return Refusal(WorkerUnreachable.code, f"the worker failed: {type(error).__name__}: {error}")


def error_of(refusal: Refusal) -> KvrouterError:
    """Return the error; a code that is not known here is a worker that did not take the request."""
    return _KINDS.get(refusal.code, WorkerUnreachable)(refusal.message, param=refusal.param)


def encode_request(request: EngineRequest) -> bytes:
    """Return ``request`` as msgpack; raise InvalidRequest for an integer that no wire carries."""
    try:
        return _encoder.encode(request)
    except OverflowError as error:
        raise InvalidRequest(f"request: {error}", param="request") from error


def decode_request(frame: bytes | memoryview) -> EngineRequest:
    """Return the request in ``frame``; raise ProtocolError."""
    try:
        return _request.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable("request", error) from error


def is_bare(chunk: EngineChunk) -> bool:
    """Whether ``chunk`` has tokens and nothing else, as most have: those travel in a shorter form."""
    return (
        chunk.finish is None
        and chunk.cached_tokens is None
        and chunk.kv_transfer_params is None
        and chunk.error is None
        and not chunk.raw
    )


def weight_of(chunk: EngineChunk) -> int:
    """Return how many tokens of credit ``chunk`` is worth, at least one. An engine's own bytes are worth one
    and are never cut: its adapter sees to it that they are few.
    """
    return 1 if chunk.raw else len(chunk.token_ids) or 1


def encode_chunk(chunk: EngineChunk) -> bytes:
    """Return ``chunk`` as msgpack."""
    return _encoder.encode(chunk)


def decode_chunk(frame: bytes | memoryview) -> EngineChunk:
    """Return the chunk in ``frame``; raise ProtocolError."""
    try:
        return _chunk.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable("chunk", error) from error


def encode_refusal(refusal: Refusal) -> bytes:
    """Return ``refusal`` as msgpack."""
    return _encoder.encode(refusal)


def decode_refusal(frame: bytes | memoryview) -> Refusal:
    """Return the refusal in ``frame``; raise ProtocolError."""
    try:
        return _refusal.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable("refusal", error) from error


def pack_tokens(tokens: object) -> bytes:
    """msgspec's ``enc_hook``: token ids as bytes. Raises NotImplementedError for anything else."""
    if not isinstance(tokens, array) or tokens.typecode != "I":
        raise NotImplementedError(f"a {type(tokens).__name__} does not travel")
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(kind: type, value: object) -> object:
    """msgspec's ``dec_hook``: the token ids in ``value``; what is opaque stays. Raises ValueError."""
    if kind is object:
        return value
    if kind is not array or not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("token_ids: must be unsigned 32-bit integers, 4 bytes each")
    tokens = array("I", value)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _unreadable(what: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{what}: {error}", param=what)


_encoder = msgspec.msgpack.Encoder(enc_hook=pack_tokens)
_request = msgspec.msgpack.Decoder(EngineRequest, dec_hook=unpack_tokens)
_chunk = msgspec.msgpack.Decoder(EngineChunk)
_refusal = msgspec.msgpack.Decoder(Refusal)
