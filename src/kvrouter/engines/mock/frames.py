"""What goes over the way between two processes of mock engines: a hello, then words, then the end.

A frame is its length (4 bytes, big-endian) and that many bytes. The first frame of the side that connects is
the hello: a fixed beginning, the version and the shared token, in plain bytes, so that a stranger is refused
before anything of it is parsed. Every other frame is a word of :mod:`kvrouter.mock.remote` or a sign of life,
in msgpack.
"""

import hmac
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from kvrouter.core.errors import KvrouterError
from kvrouter.mock import Done, Failed, GiveUp, Join, Ready, SinkWord, SourceWord, Want

HELLO = b"kvrouter mock kv "
VERSION = b"2"
HELLO_BYTES_MAX = 1_024
FRAME_BYTES_MAX = 16_384
LENGTH_BYTES = 4


class Refusal(StrEnum):
    """Why this process closed a connection."""

    STRANGER = "stranger"
    """Its first frame is no hello of ours, or none came in time."""
    VERSION = "version"
    TOKEN = "token"  # noqa: S105 - the name of a reason
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    OUT_OF_ORDER = "out_of_order"
    SILENT = "silent"
    SLOW = "slow"
    """It does not read what it is sent."""
    FULL = "full"


class ConnectionRefused(KvrouterError):
    """What the other side sent cannot be gone on with."""

    code = "mock_transfer_refused"

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Alive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A sign of life."""


_encoder = msgspec.msgpack.Encoder()
_sink_words: msgspec.msgpack.Decoder[SinkWord | Alive] = msgspec.msgpack.Decoder(
    Join | Want | Done | GiveUp | Alive
)
_source_words: msgspec.msgpack.Decoder[SourceWord | Alive] = msgspec.msgpack.Decoder(Ready | Failed | Alive)


def encode_hello(token: str) -> bytes:
    """Return the frame that a connection begins with."""
    return _frame(HELLO + VERSION + b" " + token.encode())


def check_hello(payload: bytes, token: str) -> None:
    """Raise ConnectionRefused unless ``payload`` is a hello of our version with our token."""
    if not payload.startswith(HELLO):
        raise ConnectionRefused(Refusal.STRANGER, "the first frame is no hello")
    version, _, given = payload[len(HELLO) :].partition(b" ")
    if version != VERSION:
        raise ConnectionRefused(Refusal.VERSION, f"this process speaks version {VERSION.decode()}")
    if not hmac.compare_digest(given, token.encode()):
        raise ConnectionRefused(Refusal.TOKEN, "the token is not ours")


def encode_word(word: SinkWord | SourceWord | Alive) -> bytes:
    """Return the frame of one word."""
    return _frame(_encoder.encode(word))


def decode_sink_word(payload: bytes) -> SinkWord | Alive:
    """Return what a sink said. ConnectionRefused when it is no such word."""
    try:
        return _sink_words.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise ConnectionRefused(Refusal.MALFORMED, f"not a word of a sink: {wrong}") from wrong


def decode_source_word(payload: bytes) -> SourceWord | Alive:
    """Return what a source said. ConnectionRefused when it is no such word."""
    try:
        return _source_words.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise ConnectionRefused(Refusal.MALFORMED, f"not a word of a source: {wrong}") from wrong


class FrameReader:
    """Bytes in, whole frames out. It holds one unfinished frame of ``bytes_max`` bytes at most."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are whole now. ConnectionRefused at one that is longer than allowed."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            n_bytes = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if n_bytes > self.bytes_max:
                raise ConnectionRefused(
                    Refusal.TOO_LARGE, f"a frame of {n_bytes} bytes; {self.bytes_max} are allowed"
                )
            end = LENGTH_BYTES + n_bytes
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield payload


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload
