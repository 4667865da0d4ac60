"""The frames between an engine's publisher and the door of its worker: a length, then msgpack.

The length is 4 bytes, big-endian. The first frame is the token as it is; every other one is an array whose
first element is its kind. ``native/c`` is the other end.
"""

from typing import Annotated

import msgspec

from kvrouter.core.columns import HASH_BYTES, HashColumn
from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import Medium, Removed, Stored
from kvrouter.core.ids import EngineHash

VERSION = 1

LENGTH_BYTES = 4

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Who knocks: the version of these frames, and the engine's block size in tokens."""

    version: _Count
    block_size: _Count


class Replace(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The rank holds nothing; from here on this connection, and no other, tells what it holds."""

    dp_rank: _Count


class StoredFrame(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Consecutive blocks were stored."""

    dp_rank: _Count
    medium: Medium
    parent: _Hash | None
    engine_hashes: HashColumn
    block_hashes: HashColumn

    def event(self) -> Stored:
        """The event that it tells. Raises ValueError for columns that are none."""
        parent = None if self.parent is None else EngineHash(self.parent)
        return Stored(parent, self.engine_hashes, self.block_hashes, self.medium)


class RemovedFrame(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Blocks left a medium."""

    dp_rank: _Count
    medium: Medium
    engine_hashes: HashColumn

    def event(self) -> Removed:
        """The event that it tells. Raises ValueError for a column that is none."""
        if len(self.engine_hashes) % HASH_BYTES:
            raise ValueError(f"engine_hashes: {len(self.engine_hashes)} bytes are no column of hashes")
        return Removed(self.engine_hashes, self.medium)


class LoadFrame(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """How busy a rank is."""

    dp_rank: _Count
    active_blocks: _Count
    total_blocks: _Count
    active_prefill_tokens: _Count
    running_requests: _Count
    waiting_requests: _Count


class Sync(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Asks for :class:`Synced` once everything before is taken."""

    goal: _Hash


EngineFrame = Hello | Replace | StoredFrame | RemovedFrame | LoadFrame | Sync


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The door is open."""

    version: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The door is shut, and so is the connection after this."""

    reason: str


class Synced(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Everything before the :class:`Sync` of this goal is taken."""

    goal: int


def decode_frame(payload: bytes) -> EngineFrame:
    """Return what an engine said; raise ProtocolError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"frame: {error}", param="frame") from error


def encode_reply(reply: Welcome | Refused | Synced) -> bytes:
    """Return ``reply`` with its length before it."""
    payload = _encoder.encode(reply)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[EngineFrame] = msgspec.msgpack.Decoder(EngineFrame)
