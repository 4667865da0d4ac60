"""The binary form of what router replicas tell each other, the same on every wire of the sync plane."""

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.sync import SyncMessage

VERSION = 1
"""What all routers of a fleet must agree on; part of every subject."""

MESSAGE_MAX_BYTES = 1024 * 1024
"""The largest message that a router reads or sends."""


def encode_message(message: SyncMessage) -> bytes:
    """Return ``message`` as msgpack."""
    return _encoder.encode(message)


def decode_message(frame: bytes | memoryview) -> SyncMessage:
    """Return the message in ``frame``; raise ProtocolError."""
    if len(frame) > MESSAGE_MAX_BYTES:
        raise ProtocolError(f"message: {len(frame)} bytes are more than {MESSAGE_MAX_BYTES}", param="message")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message: {error}", param="message") from error


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[SyncMessage] = msgspec.msgpack.Decoder(SyncMessage)
