"""The binary form of the event plane: what was sent is what is read, and any other bytes are refused."""

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import (
    Cleared,
    Held,
    KvBatch,
    KvEvent,
    KvEvents,
    KvSnapshot,
    Medium,
    Removed,
    Stored,
    count_blocks,
    has_cleared,
    pack_hashes,
)
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.json import unpacked
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.transports.events.encoding import (
    COUNT_MAX,
    EVENT_ID_MAX,
    REASON_MAX_CHARS,
    REASONS_MAX,
    Question,
    RangeQuestion,
    SnapshotQuestion,
    decode_answer,
    decode_batch,
    decode_load,
    decode_question,
    decode_range,
    decode_snapshot,
    encode_batch,
    encode_load,
    encode_parts,
    encode_question,
    encode_range,
    encode_snapshot,
)

DECODERS: tuple[Callable[[bytes], object], ...] = (
    decode_batch,
    decode_snapshot,
    decode_range,
    decode_load,
    decode_question,
    decode_answer,
)
RANK = WorkerRank(WorkerId(1), DpRank(0))
U64 = st.integers(0, 2**64 - 1)
RANKS = st.builds(WorkerRank, st.integers(0, 2**63 - 1).map(WorkerId), st.integers(0, 2**20).map(DpRank))
EPOCHS = U64.map(Epoch)
EVENT_IDS = st.integers(0, EVENT_ID_MAX - 10).map(EventId)
MEDIA = st.sampled_from(Medium)


@st.composite
def two_columns(draw: st.DrawFn) -> tuple[bytes, bytes]:
    n_blocks = draw(st.integers(0, 5))
    column = st.lists(U64, min_size=n_blocks, max_size=n_blocks).map(pack_hashes)
    return draw(column), draw(column)


PARENTS = st.none() | U64.map(EngineHash)
EVENTS = st.one_of(
    st.builds(
        lambda parent, both, medium: Stored(parent, both[0], both[1], medium), PARENTS, two_columns(), MEDIA
    ),
    st.builds(lambda both, medium: Removed(both[0], medium), two_columns(), MEDIA),
    st.just(Cleared()),
)
HELD = st.builds(lambda both, medium: Held(both[0], both[1], medium), two_columns(), MEDIA)
BATCHES = st.builds(
    KvBatch,
    RANKS,
    EPOCHS,
    EVENT_IDS,
    st.lists(EVENTS, max_size=8).map(tuple[KvEvent, ...]),
    st.floats(0, 2e9),
)
SNAPSHOTS = st.builds(KvSnapshot, RANKS, EPOCHS, EVENT_IDS, st.lists(HELD, max_size=4).map(tuple[Held, ...]))
COUNTS = st.integers(0, COUNT_MAX)
TRANSFERS = st.builds(KvTransfers, COUNTS, COUNTS, st.floats(0, COUNT_MAX), COUNTS, COUNTS)
SKIPPED = st.dictionaries(st.text(min_size=1, max_size=REASON_MAX_CHARS), COUNTS, max_size=REASONS_MAX)
LOADS = st.builds(
    LoadReport, RANKS, COUNTS, COUNTS, st.none() | COUNTS, COUNTS, COUNTS, st.none() | TRANSFERS, SKIPPED
)
QUESTIONS = st.builds(RangeQuestion, RANKS, EVENT_IDS, EVENT_IDS) | st.builds(SnapshotQuestion, RANKS)


@given(BATCHES, SNAPSHOTS | st.none(), LOADS, QUESTIONS)
def test_every_message_decodes_to_what_was_encoded(
    batch: KvBatch, snapshot: KvSnapshot | None, load: LoadReport, question: Question
) -> None:
    assert decode_batch(encode_batch(batch)) == batch
    assert decode_batch(memoryview(encode_batch(batch))) == batch
    assert decode_range(encode_range(batch)) == batch
    assert decode_range(encode_range(None)) is None
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot
    assert decode_load(encode_load(load)) == load
    assert decode_question(encode_question(question)) == question


@given(BATCHES, st.integers(1, 400))
def test_batch_parts_add_up_and_exceed_the_limit_only_for_one_event(batch: KvBatch, max_bytes: int) -> None:
    parts = list(encode_parts(batch, max_bytes=max_bytes))
    decoded = [decode_batch(frame) for frame, _ in parts]
    assert [n_events for _, n_events in parts] == [len(part.events) for part in decoded]
    assert tuple(event for part in decoded for event in part.events) == batch.events
    next_id = batch.first_event_id
    for part, (frame, n_events) in zip(decoded, parts, strict=True):
        assert (part.rank, part.epoch, part.first_event_id) == (batch.rank, batch.epoch, next_id)
        assert part.published_s == batch.published_s
        assert len(frame) <= max_bytes or n_events < 2
        next_id = part.next_event_id


# The events of a decoded batch are read by the native core, which must not differ from msgspec's reading.

BY_OBJECTS = msgspec.msgpack.Decoder(KvBatch)
OUT_OF_RANGE = ("batch: first_event_id: out of range", "batch: held_blocks: out of range")


def outcome(read: Callable[[bytes], KvBatch], frame: bytes) -> str:
    """The batch, or the error, as a text: NaN equals nothing."""
    try:
        batch = read(frame)
    except ProtocolError as error:
        return error.message
    return repr(msgspec.structs.replace(batch, events=tuple(batch.events)))


@given(BATCHES)
def test_events_of_a_frame_are_not_objects_until_accessed(batch: KvBatch) -> None:
    events = decode_batch(encode_batch(batch)).events
    assert isinstance(events, KvEvents)
    assert (events, hash(events)) == (batch.events, hash(batch.events))
    assert (len(events), list(events)) == (len(batch.events), list(batch.events))
    assert (count_blocks(events), has_cleared(events)) == (
        count_blocks(batch.events),
        has_cleared(batch.events),
    )
    assert decode_batch(encode_batch(batch)).weight == batch.weight


@given(BATCHES, st.slices(8))
def test_events_of_a_frame_are_sliced_as_a_tuple_is(batch: KvBatch, part: slice) -> None:
    some = decode_batch(encode_batch(batch)).events[part]
    assert isinstance(some, KvEvents)
    assert some == batch.events[part]


@given(st.lists(BATCHES, max_size=4))
def test_an_index_gets_from_a_frame_what_it_gets_from_its_objects(batches: list[KvBatch]) -> None:
    ours, theirs = NativeBlockIndex(), NativeBlockIndex()
    for batch in batches:
        frame = encode_batch(batch)
        applied = ours.apply(Slot(0), decode_batch(frame).events)
        assert applied == theirs.apply(Slot(0), BY_OBJECTS.decode(frame).events)
    assert ours.dump(Slot(0)) == theirs.dump(Slot(0))


@given(BATCHES, st.data())
def test_a_damaged_batch_is_read_or_refused_as_by_objects(batch: KvBatch, data: st.DataObject) -> None:
    frame = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(0, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(0, len(frame)) | st.just(len(frame))) :]
    frame += data.draw(st.just(b"") | st.binary(max_size=3))
    expected = outcome(lambda frame: unpacked(BY_OBJECTS, frame, "batch"), bytes(frame))
    assert outcome(decode_batch, bytes(frame)) in (expected, *OUT_OF_RANGE)


@given(BATCHES)
def test_fields_are_read_in_any_order(batch: KvBatch) -> None:
    plain = msgspec.msgpack.decode(encode_batch(batch))
    plain["events"] = [dict(reversed(event.items())) for event in plain["events"]]
    read = decode_batch(msgspec.msgpack.encode(dict(reversed(plain.items()))))
    assert msgspec.structs.replace(read, events=tuple(read.events)) == batch


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"block_hashes": b""}, r"engine_hashes and block_hashes: .* - at `\$\.events\[0\]`"),
        ({"engine_hashes": b"1234567", "block_hashes": b"1234567"}, r"engine_hashes and block_hashes: "),
        ({"medium": 4}, r"Invalid enum value 4 - at `\$\.events\[0\]\.medium`"),
        ({"parent": 1.5}, r"Expected `int \| null`, got `float` - at `\$\.events\[0\]\.parent`"),
    ],
)
def test_malformed_stored_event_is_refused(fields: dict[str, object], why: str) -> None:
    event = {
        "type": "stored",
        "parent": None,
        "engine_hashes": bytes(8),
        "block_hashes": bytes(8),
        "medium": 0,
    }
    frame = {"rank": RANK, "epoch": 1, "first_event_id": 0, "events": [event | fields]}
    with pytest.raises(ProtocolError, match=why):
        decode_batch(msgspec.msgpack.encode(frame))


def refused_or_read(frame: bytes) -> None:
    for decode in DECODERS:
        with suppress(ProtocolError):
            decode(frame)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(frame: bytes) -> None:
    refused_or_read(frame)


@given(BATCHES, st.data())
def test_a_damaged_frame_is_read_or_refused(batch: KvBatch, data: st.DataObject) -> None:
    frame = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    refused_or_read(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    refused_or_read(bytes(frame))


@pytest.mark.parametrize("held_blocks", [-1, COUNT_MAX + 1])
def test_heartbeat_with_out_of_range_held_blocks_is_refused(held_blocks: int) -> None:
    batch = KvBatch(RANK, Epoch(1), EventId(0), (), held_blocks=held_blocks)
    for decode in (decode_batch, decode_range):
        with pytest.raises(ProtocolError, match="held_blocks"):
            decode(encode_batch(batch))


@pytest.mark.parametrize("first", [-1, EVENT_ID_MAX + 1, 2**64 - 1])
def test_out_of_range_event_ids_are_refused(first: int) -> None:
    """A router would ask for the ids before them, and could not even write the question."""
    batch = KvBatch(RANK, Epoch(1), EventId(first), (Cleared(),))
    for decode in (decode_batch, decode_range):
        with pytest.raises(ProtocolError, match="first_event_id"):
            decode(encode_batch(batch))
    with pytest.raises(ProtocolError, match="next_event_id"):
        decode_snapshot(encode_snapshot(KvSnapshot(RANK, Epoch(1), EventId(first), ())))


@pytest.mark.parametrize("count", [-1, COUNT_MAX + 1, 2**64 - 1])
@pytest.mark.parametrize(
    "field", ["active_blocks", "total_blocks", "active_prefill_tokens", "running_requests"]
)
def test_load_report_with_out_of_range_count_is_refused(field: str, count: int) -> None:
    load = msgspec.structs.replace(LoadReport(RANK, 1, 2), **{field: count})
    with pytest.raises(ProtocolError) as refused:
        decode_load(encode_load(load))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("transfers", "field"),
    [
        (KvTransfers(-1, 0, 0.0), "transfers"),
        (KvTransfers(0, 2**64 - 1, 0.0), "bytes"),
        (KvTransfers(0, 0, float("nan")), "seconds"),
        (KvTransfers(0, 0, float("inf")), "seconds"),
        (KvTransfers(0, 0, -0.5), "seconds"),
        (KvTransfers(0, 0, 0.0, failed=-1), "failed"),
        (KvTransfers(0, 0, 0.0, tokens=-1), "tokens"),
    ],
)
def test_load_report_with_out_of_range_transfers_is_refused(transfers: KvTransfers, field: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_load(encode_load(LoadReport(RANK, 1, 2, kv_transfers=transfers)))
    assert refused.value.param == field


@pytest.mark.parametrize(
    "skipped",
    [
        {"orphan": -1},
        {"orphan": COUNT_MAX + 1},
        {"": 1},
        {"x" * (REASON_MAX_CHARS + 1): 1},
        {str(number): 1 for number in range(REASONS_MAX + 1)},
    ],
)
def test_invalid_counts_of_skipped_events_are_refused(skipped: dict[str, int]) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_load(encode_load(LoadReport(RANK, 1, 2, kv_events_skipped=skipped)))
    assert refused.value.param == "kv_events_skipped"
