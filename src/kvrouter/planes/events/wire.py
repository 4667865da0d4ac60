"""The binary form of KV events, snapshots, loads and questions, the same on every wire of the event plane.

Hash columns travel as they are: 8 bytes a hash. Whatever cannot be read is a :class:`ProtocolError`.
"""

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerRank
from kvrouter.core.workers import LoadReport

VERSION = 1
"""What both ends of an event plane must agree on; part of every subject, topic and hello."""

BATCH_MAX_BYTES = 8 * 1024 * 1024
"""The largest batch that a router reads."""

SNAPSHOT_MAX_BYTES = 512 * 1024 * 1024
"""The largest snapshot of one rank: 16 bytes a block, 32 million blocks."""


class RangeQuestion(msgspec.Struct, frozen=True, tag="range"):
    """Ask a worker for the events ``first`` to ``last``, inclusive."""

    rank: WorkerRank
    first: EventId
    last: EventId


class SnapshotQuestion(msgspec.Struct, frozen=True, tag="snapshot"):
    """Ask a worker for the whole state of one rank."""

    rank: WorkerRank


Question = RangeQuestion | SnapshotQuestion


def encode_batch(batch: KvBatch) -> bytes:
    """Return ``batch`` as msgpack."""
    return _encoder.encode(batch)


def decode_batch(frame: bytes | memoryview) -> KvBatch:
    """Return the batch in ``frame``; raise ProtocolError."""
    try:
        batch = _batch.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable("batch", error) from error
    if batch.first_event_id < 0:
        raise ProtocolError("batch: first_event_id: must be 0 or more", param="first_event_id")
    return batch


def encode_snapshot(snapshot: KvSnapshot | None) -> bytes:
    """Return ``snapshot``, or that there is none, as msgpack."""
    return _encoder.encode(snapshot)


def decode_snapshot(frame: bytes | memoryview) -> KvSnapshot | None:
    """Return the snapshot in ``frame``; raise ProtocolError."""
    try:
        return _snapshot.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable("snapshot", error) from error


def encode_range(batch: KvBatch | None) -> bytes:
    """Return the answer to a :class:`RangeQuestion` as msgpack."""
    return _encoder.encode(batch)


def decode_range(frame: bytes | memoryview) -> KvBatch | None:
    """Return the answer in ``frame``; raise ProtocolError."""
    try:
        return _range.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable("batch", error) from error


def encode_load(report: LoadReport) -> bytes:
    """Return ``report`` as msgpack."""
    return _encoder.encode(report)


def decode_load(frame: bytes | memoryview) -> LoadReport:
    """Return the load report in ``frame``; raise ProtocolError."""
    try:
        return _load.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable("load", error) from error


def encode_question(question: Question) -> bytes:
    """Return ``question`` as msgpack."""
    return _encoder.encode(question)


def decode_question(frame: bytes | memoryview) -> Question:
    """Return the question in ``frame``; raise ProtocolError."""
    try:
        return _question.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable("question", error) from error


def _unreadable(what: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{what}: {error}", param=what)


_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(KvBatch)
_range: msgspec.msgpack.Decoder[KvBatch | None] = msgspec.msgpack.Decoder(KvBatch | None)
_snapshot: msgspec.msgpack.Decoder[KvSnapshot | None] = msgspec.msgpack.Decoder(KvSnapshot | None)
_load = msgspec.msgpack.Decoder(LoadReport)
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
