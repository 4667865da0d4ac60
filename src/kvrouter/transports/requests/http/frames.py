"""Frames of a response over HTTP: length, kind, msgpack.

======  ===========================================
``c``   an EngineChunk
``e``   an error: the leg is lost; the last frame
======  ===========================================

A frame of length 0 is a heartbeat.
"""

from collections.abc import Iterator

from kvrouter.core.errors import ProtocolError
from kvrouter.core.requests import EngineChunk
from kvrouter.transports.requests.encoding import (
    CHUNKS_MAX_BYTES,
    ErrorMessage,
    decode_chunk,
    decode_refusal,
    encode_chunk,
    encode_refusal,
)

ROUTER_HEADER = "x-kvrouter-router"
LEG_HEADER = "x-kvrouter-leg"
MSGPACK = "application/vnd.msgpack"
FRAMES = "application/vnd.kvrouter.frames"

REASON_MAX_BYTES = 1024
"""The longest reason of a cancellation that a worker reads."""

REFUSAL_MAX_BYTES = 64 * 1024
"""The longest refusal that a router reads."""

ALIVE = bytes(4)

_CHUNK = ord("c")
_FAILURE = ord("e")


def chunk_frame(chunk: EngineChunk) -> bytes:
    """Encode ``chunk`` as a frame."""
    return _frame(b"c", encode_chunk(chunk))


def failure_frame(refusal: ErrorMessage) -> bytes:
    """Return the frame that ends a leg with an error."""
    return _frame(b"e", encode_refusal(refusal))


def _frame(kind: bytes, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(4, "big") + kind + payload


class HttpFrameReader:
    """Splits received bytes into frames; does no I/O."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[EngineChunk | ErrorMessage]:
        """Yield the complete frames, decoded; heartbeats yield nothing. Raises ProtocolError."""
        received = self._rest + received if self._rest else received
        self._rest = b""
        at = 0
        while len(received) - at >= 4:
            n_bytes = int.from_bytes(received[at : at + 4], "big")
            if n_bytes > CHUNKS_MAX_BYTES:
                raise ProtocolError(f"a frame of {n_bytes} bytes, above {CHUNKS_MAX_BYTES}", param="length")
            if len(received) - at - 4 < n_bytes:
                break
            at += 4
            if n_bytes:
                yield _item(memoryview(received)[at : at + n_bytes])
            at += n_bytes
        self._rest = received[at:]


def _item(frame: memoryview) -> EngineChunk | ErrorMessage:
    if frame[0] == _CHUNK:
        return decode_chunk(frame[1:])
    if frame[0] == _FAILURE:
        return decode_refusal(frame[1:])
    raise ProtocolError(f"a frame of kind {frame[0]}", param="kind")
