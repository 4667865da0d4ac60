"""The binary form of KV events, snapshots, loads and recovery.

Hash columns are sent as they are: 8 bytes a hash. Undecodable input raises :class:`ProtocolError`.
"""

from collections.abc import Iterator

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch, KvEvents, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, WorkerRank
from kvrouter.core.json import Unreadable, unpack, unpacked
from kvrouter.core.workers import KvTransfers, LoadReport

VERSION = 1
"""The protocol version that both ends must share; part of every subject, topic and hello."""

BATCH_MAX_BYTES = 8 * 1024 * 1024
"""The largest batch that a router reads."""

SNAPSHOT_MAX_BYTES = 512 * 1024 * 1024
"""The largest snapshot of one rank: 16 bytes a block, 32 million blocks."""

SNAPSHOT_BLOCK_BYTES = 24
"""Upper bound of the average bytes of a block in a snapshot: two hashes, and a share of the overhead."""

SNAPSHOT_LEAST_BYTES = 1024 * 1024
"""A snapshot up to this size is read whatever its rank can hold."""

RANGE_MAX_BYTES = 64 * 1024 * 1024
"""The largest answer about a range of events; a longer gap is filled by a snapshot."""

EVENT_TIMES = 64
"""Allowed ratio of decoded values to bytes: events and ranks become objects no larger than their bytes."""

EVENT_ID_MAX = 2**62
"""The largest event id that is accepted."""


COUNT_MAX = 2**62
"""The largest count in a load report or a heartbeat, bytes included."""


REASONS_MAX = 64
REASON_MAX_CHARS = 64
"""Limits of the reasons of skipped KV events: each becomes a label of a metric."""


class RangeQuestion(msgspec.Struct, frozen=True, tag="range"):
    """Ask a worker for the events ``first`` to ``last``, inclusive."""

    rank: WorkerRank
    first: EventId
    last: EventId


class SnapshotQuestion(msgspec.Struct, frozen=True, tag="snapshot"):
    """Ask a worker for the state of one rank."""

    rank: WorkerRank


class PieceQuestion(msgspec.Struct, frozen=True, tag="piece"):
    """Ask for the piece ``number``, from 1, of an answer that began with a :class:`FirstPiece`."""

    transfer: int
    number: int


Question = RangeQuestion | SnapshotQuestion | PieceQuestion


class WholeAnswer(msgspec.Struct, frozen=True, tag="whole"):
    """An answer in one frame; ``body`` as by :func:`encode_range` or :func:`encode_snapshot`."""

    body: bytes


class FirstPiece(msgspec.Struct, frozen=True, tag="first"):
    """The beginning of an answer of ``total_bytes`` bytes. The other pieces are requested in order.

    All pieces but the last have the length of this one; ``crc32`` is that of the complete answer.
    """

    transfer: int
    total_bytes: int
    crc32: int
    body: bytes


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """A further piece of an answer."""

    number: int
    body: bytes


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """Too many large answers are in progress: ask again in a moment."""


class TransferGone(msgspec.Struct, frozen=True, tag="gone"):
    """The piece's transfer is over, or was dropped because its next piece was not requested in time."""


Answer = WholeAnswer | FirstPiece | Piece | Busy | TransferGone


def encode_batch(batch: KvBatch) -> bytes:
    """Return ``batch`` as msgpack."""
    return _encoder.encode(batch)


def encode_parts(batch: KvBatch, *, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield ``batch`` as frames of at most ``max_bytes`` with consecutive ids, each with its event count.

    A single event that is too large is still a frame, which no transport accepts: receivers notice the gap
    and ask, and an answer comes in pieces.
    """
    frame = encode_batch(batch)
    n_events = len(batch.events)
    if len(frame) <= max_bytes or n_events < 2:
        yield frame, n_events
        return
    half = n_events // 2
    rest = EventId(batch.first_event_id + half)
    yield from encode_parts(msgspec.structs.replace(batch, events=batch.events[:half]), max_bytes=max_bytes)
    later = msgspec.structs.replace(batch, first_event_id=rest, events=batch.events[half:])
    yield from encode_parts(later, max_bytes=max_bytes)


def decode_batch(frame: bytes | memoryview) -> KvBatch:
    """Return the batch in ``frame``; raise ProtocolError."""
    batch = _read_natively(frame)
    return _checked(unpacked(_batch, frame, "batch", times=EVENT_TIMES) if batch is None else batch)


def encode_snapshot(snapshot: KvSnapshot | None) -> bytes:
    """Return ``snapshot``, or None for no snapshot, as msgpack."""
    return _encoder.encode(snapshot)


def snapshot_max_bytes(blocks_max: int) -> int:
    """Return the size of the largest snapshot that a rank of ``blocks_max`` blocks needs."""
    return min(SNAPSHOT_MAX_BYTES, SNAPSHOT_LEAST_BYTES + SNAPSHOT_BLOCK_BYTES * blocks_max)


def decode_snapshot(frame: bytes | memoryview) -> KvSnapshot | None:
    """Return the snapshot in ``frame``; raise ProtocolError."""
    snapshot = unpacked(_snapshot, frame, "snapshot", times=EVENT_TIMES)
    if snapshot is not None and not 0 <= snapshot.next_event_id <= EVENT_ID_MAX:
        raise ProtocolError("snapshot: next_event_id: out of range", param="next_event_id")
    return snapshot


def encode_range(batch: KvBatch | None) -> bytes:
    """Return the answer to a :class:`RangeQuestion` as msgpack."""
    return _encoder.encode(batch)


def decode_range(frame: bytes | memoryview) -> KvBatch | None:
    """Return the answer in ``frame``; raise ProtocolError."""
    batch = _read_natively(frame) or unpacked(_range, frame, "batch", times=EVENT_TIMES)
    return None if batch is None else _checked(batch)


def encode_load(report: LoadReport) -> bytes:
    """Return ``report`` as msgpack."""
    return _encoder.encode(report)


def decode_load(frame: bytes | memoryview) -> LoadReport:
    """Return the load report in ``frame``; raise ProtocolError."""
    report = unpacked(_load, frame, "load")
    _check_counts(report)
    if report.kv_transfers is not None:
        _check_counts(report.kv_transfers)
    if len(report.kv_events_skipped) > REASONS_MAX:
        raise ProtocolError("load: kv_events_skipped: too many reasons", param="kv_events_skipped")
    for reason, n in report.kv_events_skipped.items():
        if not 0 < len(reason) <= REASON_MAX_CHARS or not 0 <= n <= COUNT_MAX:
            raise ProtocolError("load: kv_events_skipped: out of range", param="kv_events_skipped")
    return report


def encode_question(question: Question) -> bytes:
    """Return ``question`` as msgpack."""
    return _encoder.encode(question)


def decode_question(frame: bytes | memoryview) -> Question:
    """Decode ``frame``; raise ProtocolError if malformed."""
    return unpacked(_question, frame, "question")


def encode_answer(answer: Answer) -> bytes:
    """Return ``answer`` as msgpack."""
    return _encoder.encode(answer)


def decode_answer(frame: bytes | memoryview) -> Answer:
    """Return the answer in ``frame``; raise ProtocolError."""
    return unpacked(_answer, frame, "answer")


class _Frame(msgspec.Struct):
    """A :class:`KvBatch` whose events are not decoded."""

    rank: WorkerRank
    epoch: Epoch
    first_event_id: EventId
    events: msgspec.Raw
    published_s: float = 0.0
    held_blocks: int | None = None


def _read_natively(frame: bytes | memoryview) -> KvBatch | None:
    """Return the batch in ``frame``, without an object for each event.

    Returns None for what the native core does not read: other values than batches, malformed batches, and
    events whose fields have another order than :func:`encode_batch` gives them.
    """
    try:
        fields = unpack(_frame, frame, times=EVENT_TIMES)
    except Unreadable:
        return None
    events = KvEvents.decode(fields.events)
    if events is None:
        return None
    return KvBatch(
        fields.rank, fields.epoch, fields.first_event_id, events, fields.published_s, fields.held_blocks
    )


def _checked(batch: KvBatch) -> KvBatch:
    if not 0 <= batch.first_event_id <= EVENT_ID_MAX:
        raise ProtocolError("batch: first_event_id: out of range", param="first_event_id")
    if batch.held_blocks is not None and not 0 <= batch.held_blocks <= COUNT_MAX:
        raise ProtocolError("batch: held_blocks: out of range", param="held_blocks")
    return batch


def _check_counts(report: LoadReport | KvTransfers) -> None:
    """Raise ProtocolError for a count that is negative, infinite or NaN."""
    for field in msgspec.structs.fields(report):
        value = getattr(report, field.name)
        if isinstance(value, int | float) and not 0 <= value <= COUNT_MAX:
            raise ProtocolError(f"load: {field.name}: out of range", param=field.name)


_encoder = msgspec.msgpack.Encoder()
_frame = msgspec.msgpack.Decoder(_Frame)
_batch = msgspec.msgpack.Decoder(KvBatch)
_range: msgspec.msgpack.Decoder[KvBatch | None] = msgspec.msgpack.Decoder(KvBatch | None)
_snapshot: msgspec.msgpack.Decoder[KvSnapshot | None] = msgspec.msgpack.Decoder(KvSnapshot | None)
_load = msgspec.msgpack.Decoder(LoadReport)
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
