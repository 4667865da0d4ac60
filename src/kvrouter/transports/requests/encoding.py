"""The binary form of requests, chunks and errors. See ``docs/wire.md``.

Token ids are sent as unsigned 32-bit little-endian integers in one run of bytes. Undecodable input raises
:class:`ProtocolError` that names the field; unknown fields are skipped, so that fields can be added.
"""

import sys
from array import array

import msgspec

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrouterError,
    ProtocolError,
    ShuttingDown,
    UnknownModel,
)
from kvrouter.core.json import unpacked
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.transports.requests.port import (
    EngineFailed,
    EngineFailedLater,
    LegRepeated,
    StreamBroken,
    WorkerDeclined,
    WorkerFull,
    WorkerUnreachable,
)

VERSION = 1
"""The protocol version that both ends must share; see ``docs/wire.md``."""

REQUEST_MAX_BYTES = 64 * 1024 * 1024
"""The largest request that a worker reads: 16 million tokens."""

CHUNKS_MAX_BYTES = 16 * 1024 * 1024
"""The largest frame of chunks that a router reads."""

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
        WorkerDeclined,
        LegRepeated,
        StreamBroken,
        EngineFailed,
        EngineFailedLater,
    )
}


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True):
    """An encoded error: the stable code of its class, its message, the field it is about, and the engine's
    answer for an engine error. Older routers read the first three.
    """

    code: str
    message: str
    param: str | None = None
    answer: EngineAnswer | None = None


def refusal_of(error: Exception) -> ErrorMessage:
    """Encode ``error``; one without a code in ``_KINDS`` becomes :class:`StreamBroken`."""
    if isinstance(error, KvrouterError) and error.code in _KINDS:
        return ErrorMessage(error.code, error.message, error.param, error.answer)
    return ErrorMessage(StreamBroken.code, f"the worker failed: {type(error).__name__}: {error}")


def error_of(refusal: ErrorMessage) -> KvrouterError:
    """Return the error of a message; an unknown code becomes WorkerUnreachable."""
    return _KINDS.get(refusal.code, WorkerUnreachable)(
        refusal.message, param=refusal.param, answer=refusal.answer
    )


def encode_request(request: msgspec.Struct) -> bytes:
    """Return ``request``, or a frame's body with it, as msgpack; raise InvalidRequest for an integer that
    msgpack cannot encode.
    """
    try:
        return _encoder.encode(request)
    except OverflowError as error:
        raise InvalidRequest(f"request: {error}", param="request") from error


def decode_request(frame: bytes | memoryview) -> EngineRequest:
    """Return the request in ``frame``; raise ProtocolError."""
    return unpacked(_request, frame, "request")


def is_bare(chunk: EngineChunk) -> bool:
    """Whether ``chunk`` has tokens and nothing else, as most have: those have a shorter encoding."""
    return (
        chunk.finish is None
        and chunk.cached_tokens is None
        and chunk.kv_bytes is None
        and chunk.kv_transfer_params is None
        and chunk.error is None
        and not chunk.raw
        and not chunk.comments
    )


def weight_of(chunk: EngineChunk) -> int:
    """Return the tokens of credit that ``chunk`` is worth, at least one. An engine's raw bytes are worth one
    and are never split: the engine's adapter keeps them short.
    """
    return 1 if chunk.raw else len(chunk.token_ids) or 1


def credit_of(chunk: EngineChunk) -> int:
    """Return the tokens of credit that ``chunk`` takes: 0 for a last chunk without content."""
    if chunk.finish is not None and not chunk.token_ids and not chunk.raw:
        return 0
    return weight_of(chunk)


def encode_chunk(chunk: EngineChunk) -> bytes:
    """Return ``chunk`` as msgpack."""
    return _encoder.encode(chunk)


def decode_chunk(frame: bytes | memoryview) -> EngineChunk:
    """Return the chunk in ``frame``; raise ProtocolError."""
    return unpacked(_chunk, frame, "chunk")


def encode_refusal(refusal: ErrorMessage) -> bytes:
    """Return ``refusal`` as msgpack."""
    return _encoder.encode(refusal)


def decode_refusal(frame: bytes | memoryview) -> ErrorMessage:
    """Return the refusal in ``frame``; raise ProtocolError."""
    return unpacked(_refusal, frame, "refusal")


def pack_tokens(tokens: object) -> bytes:
    """msgspec's ``enc_hook``: token ids as bytes. Raises NotImplementedError for anything else."""
    if not isinstance(tokens, array) or tokens.typecode != "I":
        raise NotImplementedError(f"a {type(tokens).__name__} does not travel")
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(kind: type, value: object) -> object:
    """msgspec's ``dec_hook``: the token ids in ``value``; opaque values are kept. Raises ValueError."""
    if kind is object:
        return value
    if kind is not array or not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("token_ids: must be unsigned 32-bit integers, 4 bytes each")
    tokens = array("I", value)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


_encoder = msgspec.msgpack.Encoder(enc_hook=pack_tokens)
_request = msgspec.msgpack.Decoder(EngineRequest, dec_hook=unpack_tokens)
_chunk = msgspec.msgpack.Decoder(EngineChunk)
_refusal = msgspec.msgpack.Decoder(ErrorMessage)
