"""Event ingest between a subscriber that a test turns by hand and a real index."""

import asyncio
import time
from collections.abc import Callable

import pytest

from kvrouter.core.events import Cleared, Held, KvBatch, KvEvent, KvSnapshot, Removed, Stored, pack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import TokenBuffer
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeApproximateIndex, NativeBlockIndex
from kvrouter.router import event_ingest
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import RANK_BLOCKS_MAX, SNAPSHOTS_ASKED_MAX, EventIngest
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.encoding import decode_batch, encode_batch
from kvrouter.transports.events.port import BatchSink, LoadSink
from tests.testing.constants import SetConstants
from tests.testing.virtual_time import in_virtual_time
from tests.testing.waits import until

BLOCK = 4
RANK = WorkerRank(WorkerId(1), DpRank(0))
OTHER = WorkerRank(WorkerId(2), DpRank(0))
SLOT, OTHER_SLOT = Slot(0), Slot(1)
EPOCH = Epoch(7)
PROMPT = Prompt(TokenBuffer("I", range(4 * BLOCK)), block_size=BLOCK)


class AskedSubscriber:
    """Notes each question; the test answers it."""

    def __init__(self) -> None:
        self.snapshots: list[tuple[WorkerRank, asyncio.Future[KvSnapshot | None]]] = []
        self.ranges: list[tuple[EventId, EventId, asyncio.Future[KvBatch | None]]] = []

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        return lambda: None

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        return lambda: None

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        future: asyncio.Future[KvBatch | None] = asyncio.get_running_loop().create_future()
        self.ranges.append((first, last, future))
        return await future

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:
        self.blocks_max = blocks_max
        future: asyncio.Future[KvSnapshot | None] = asyncio.get_running_loop().create_future()
        self.snapshots.append((rank, future))
        return await future


class Bench:
    def __init__(
        self, *, rank_blocks_max: int = RANK_BLOCKS_MAX, snapshots_asked_max: int = SNAPSHOTS_ASKED_MAX
    ) -> None:
        self.later_s = 0.0
        """How far the clock of the ingest is ahead of the event loop's."""
        self.subscriber = AskedSubscriber()
        self.index = NativeBlockIndex()
        self.telemetry = Telemetry()
        self.ingest = EventIngest(
            self.index,
            self.subscriber,
            ModelInstrumentation(self.telemetry, "mock"),
            rank_blocks_max=rank_blocks_max,
            snapshots_asked_max=snapshots_asked_max,
            clock=lambda: asyncio.get_running_loop().time() + self.later_s,
        )
        self.view = EventCacheView(self.index, self.ingest, NativeApproximateIndex())

    def overlap(self) -> list[int]:
        overlap = self.view.overlap(PROMPT, 2, now_s=0.0)
        assert overlap is not None
        return [int(blocks) for blocks in overlap]

    def state(self, slot: Slot = SLOT) -> FeedState:
        return dict(self.ingest.feed_readings())[slot].state

    async def join(self, rank: WorkerRank = RANK, slot: Slot = SLOT, held: tuple[Held, ...] = ()) -> None:
        """Discover a rank, and answer for it."""
        asked = len(self.subscriber.snapshots)
        self.ingest.joined(rank, slot, EPOCH)
        await until(lambda: len(self.subscriber.snapshots) > asked)
        self.subscriber.snapshots[-1][1].set_result(KvSnapshot(rank, EPOCH, EventId(0), held))
        await until(lambda: self.state(slot) is FeedState.LIVE)

    async def asked_range(self) -> tuple[EventId, EventId, asyncio.Future[KvBatch | None]]:
        await until(lambda: bool(self.subscriber.ranges))
        return self.subscriber.ranges.pop()

    async def asked_snapshot(self) -> asyncio.Future[KvSnapshot | None]:
        await until(lambda: not self.subscriber.snapshots[-1][1].done())
        return self.subscriber.snapshots[-1][1]


def stored(first: int, n: int, *, parent: int | None = None) -> Stored:
    """Blocks ``first`` to ``first + n`` of the prompt; the engine calls the i-th one 100 + i."""
    hashes = PROMPT.block_hashes[8 * first : 8 * (first + n)]
    names = pack_hashes(range(100 + first, 100 + first + n))
    return Stored(None if parent is None else EngineHash(parent), names, hashes)


def batch(first_id: int, *events: KvEvent, rank: WorkerRank = RANK, epoch: Epoch = EPOCH) -> KvBatch:
    return KvBatch(rank, epoch, EventId(first_id), events)


async def test_a_rank_scores_after_its_snapshot_is_loaded() -> None:
    bench = Bench()
    bench.ingest.joined(RANK, SLOT, EPOCH)
    assert not bench.ingest.all_score
    assert bench.state() is FeedState.RECOVERING
    await until(lambda: len(bench.subscriber.snapshots) == 1)
    held = Held(pack_hashes([100, 101]), PROMPT.sequence_hashes[:16])
    bench.subscriber.snapshots[0][1].set_result(KvSnapshot(RANK, EPOCH, EventId(3), (held,)))
    await until(lambda: bench.ingest.all_score)
    assert bench.overlap() == [2, 0]
    bench.ingest.on_batch(batch(3, stored(2, 1, parent=101)))
    assert bench.overlap() == [3, 0], "events go on where the snapshot ended"
    assert bench.telemetry.feed_events.value("mock", "blocks_stored") == 3


async def test_batches_are_applied_in_order_and_repeats_are_dropped() -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(batch(0, stored(0, 2), stored(2, 1, parent=101)))
    bench.ingest.on_batch(batch(0, stored(0, 2)))
    assert bench.overlap() == [3, 0]
    assert bench.telemetry.feed_events.value("mock", "repeated_events") == 1
    bench.ingest.on_batch(batch(2, Removed(pack_hashes([101]))))
    assert bench.overlap() == [1, 0], "a prefix must be contiguous"
    bench.ingest.on_batch(batch(3, Cleared()))
    assert bench.overlap() == [0, 0]


async def test_a_rank_with_a_gap_scores_nothing_until_the_gap_is_filled() -> None:
    bench = Bench()
    await bench.join()
    await bench.join(OTHER, OTHER_SLOT)
    bench.ingest.on_batch(batch(0, stored(0, 2)))
    bench.ingest.on_batch(batch(0, stored(0, 4), rank=OTHER))
    bench.ingest.on_batch(batch(2, stored(3, 1, parent=102)))
    assert bench.state() is FeedState.RECOVERING
    assert bench.overlap() == [0, 4], "only the rank with the gap is silent"
    first, last, answer = await bench.asked_range()
    assert (first, last) == (1, 1)
    answer.set_result(batch(1, stored(2, 1, parent=101)))
    await until(lambda: bench.ingest.all_score)
    assert bench.overlap() == [4, 4], "and what came meanwhile is not lost"
    assert bench.telemetry.feed_events.value("mock", "gaps") == 1


async def test_a_range_lost_at_the_worker_is_replaced_by_a_snapshot() -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(batch(0, stored(0, 3)))
    bench.ingest.on_batch(batch(5, Removed(pack_hashes([100]))))
    _, _, answer = await bench.asked_range()
    answer.set_result(None)
    held = Held(pack_hashes([100]), PROMPT.sequence_hashes[:8])
    await until(lambda: len(bench.subscriber.snapshots) == 2)
    (await bench.asked_snapshot()).set_result(KvSnapshot(RANK, EPOCH, EventId(6), (held,)))
    await until(lambda: bench.ingest.all_score)
    assert bench.overlap() == [1, 0], "what the snapshot does not name is forgotten"


async def test_lost_history_empties_the_rank_and_makes_its_feed_partial() -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(batch(0, stored(0, 3)))
    bench.ingest.on_batch(batch(5, stored(0, 1)))
    (await bench.asked_range())[2].set_result(None)
    await until(lambda: len(bench.subscriber.snapshots) == 2)
    (await bench.asked_snapshot()).set_result(None)
    await until(lambda: bench.state() is FeedState.PARTIAL)
    assert bench.ingest.all_score, "a lower bound scores"
    assert bench.overlap() == [1, 0], "of what may be gone nothing is kept"
    assert dict(bench.ingest.feed_readings())[SLOT].stale_s > 0


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("not a batch")])
async def test_failed_recovery_questions_make_the_feed_partial(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(batch(3, stored(0, 1)))
    (await bench.asked_range())[2].set_exception(error)
    await until(lambda: "recovery_failed" in caplog.text)
    await until(lambda: len(bench.subscriber.snapshots) == 2)
    (await bench.asked_snapshot()).set_exception(error)
    await until(lambda: bench.state() is FeedState.PARTIAL)
    ((_, feed),) = bench.ingest.feeds()
    assert feed.next_timeout_s is not None, "it asks again later"
    bench.ingest.close()


async def test_an_orphan_block_is_not_indexed_and_makes_the_feed_partial() -> None:
    """A snapshot came just now, so asking again waits: what is known is a lower bound, and it scores."""
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(batch(0, stored(0, 1), stored(2, 1, parent=101)))
    assert bench.state() is FeedState.PARTIAL
    assert bench.overlap() == [1, 0]
    assert bench.telemetry.feed_events.value("mock", "blocks_orphaned") == 1
    ((_, feed),) = bench.ingest.feeds()
    assert feed.next_timeout_s is not None, "it asks again later"
    bench.ingest.close()


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Stored(EngineHash(-1), bytes(8), bytes(8)), "parent: an unsigned 64-bit hash or None, not -1"),
        (Removed(b"1234567"), "engine_hashes: a column of 8-byte hashes, not 7 bytes"),
    ],
)
async def test_malformed_event_is_logged_and_starts_a_recovery(
    event: KvEvent, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    await bench.join()
    bench.later_s = 60.0  # a snapshot that was just loaded would not be asked for again
    bench.ingest.on_batch(decode_batch(encode_batch(batch(0, stored(0, 2), event))))
    assert (bench.state(), bench.index.held(SLOT)) == (FeedState.RECOVERING, 0)
    (mistaken,) = (vars(line)["kvrouter_fields"] for line in caplog.records if "mistaken" in line.message)
    assert mistaken["reason"] == why
    bench.ingest.close()


async def test_a_freed_slot_is_empty_for_the_next_rank() -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(batch(0, stored(0, 3)))
    bench.ingest.freed(SLOT)
    assert bench.ingest.all_score
    assert list(bench.ingest.feeds()) == []
    bench.ingest.on_batch(batch(1, stored(3, 1, parent=102)))
    assert bench.index.stats().blocks[0] == 0, "a late batch of the old worker is let go"
    await bench.join(OTHER, SLOT)
    assert bench.overlap() == [0, 0]


async def test_a_slot_freed_during_recovery_cancels_its_question() -> None:
    bench = Bench()
    bench.ingest.joined(RANK, SLOT, EPOCH)
    await until(lambda: len(bench.subscriber.snapshots) == 1)
    bench.ingest.freed(SLOT)
    _, asked = bench.subscriber.snapshots[0]
    await until(asked.cancelled)
    assert bench.ingest.all_score
    bench.ingest.freed(SLOT)
    assert bench.ingest.all_score, "freeing it again changes nothing"


async def test_only_the_joined_slot_scores_at_a_high_slot_number() -> None:
    bench = Bench()
    far = Slot(300)
    await bench.join(RANK, far)
    assert bool(bench.ingest.scores(301)[far])
    assert not bench.ingest.scores(301)[: int(far)].any()


@in_virtual_time
async def test_a_silent_event_stream_is_reported_missing_once_until_a_batch(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    def missed() -> int:
        return caplog.text.count("kv_events_missing")

    set_constants(event_ingest, SILENT_AFTER_S=0.02)
    bench = Bench()
    await bench.join()
    await until(lambda: missed() == 1)
    reading = dict(bench.ingest.feed_readings())[SLOT]
    assert (reading.is_missing, reading.state) == (True, FeedState.LIVE)
    assert reading.silent_s > 0.02
    await asyncio.sleep(0.05)
    assert missed() == 1, "said once"
    set_constants(event_ingest, SILENT_AFTER_S=1000.0)
    bench.ingest.on_batch(batch(0))
    reading = dict(bench.ingest.feed_readings())[SLOT]
    assert (reading.is_missing, reading.silent_s < 1000.0) == (False, True), "a heartbeat is enough"
    bench.ingest.close()


@in_virtual_time
async def test_a_blocked_event_loop_reports_no_rank_as_missing(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(event_ingest, SILENT_AFTER_S=0.3)
    bench = Bench()
    await bench.join()
    time.sleep(0.5)  # noqa: ASYNC251 - the event loop is blocked, longer than a rank may be silent
    for _ in range(3):
        await asyncio.sleep(0)  # the timer that is due
    bench.ingest.on_batch(batch(0))
    assert "kv_events_missing" not in caplog.text
    bench.ingest.close()


@in_virtual_time
async def test_an_event_loop_that_is_always_blocked_reports_a_missing_rank(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(event_ingest, SILENT_AFTER_S=0.3)
    bench = Bench()
    await bench.join()
    for _ in range(2):
        assert "kv_events_missing" not in caplog.text
        time.sleep(0.5)  # noqa: ASYNC251 - the event loop is blocked
        for _ in range(3):
            await asyncio.sleep(0)  # the timer that is due
    assert "kv_events_missing" in caplog.text
    bench.ingest.close()


async def test_a_heartbeat_with_another_block_count_asks_for_a_snapshot() -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(0), (stored(0, 3),)))
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(1), (), held_blocks=3))
    assert bench.state() is FeedState.LIVE
    bench.later_s = 60.0  # its last snapshot is a while ago
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(0), (), held_blocks=0))
    assert bench.state() is FeedState.LIVE, "a count is compared with that of the same id"
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(1), (), held_blocks=4))
    assert bench.state() is FeedState.RECOVERING
    assert bench.overlap()[SLOT] == 0
    held = Held(pack_hashes([1]), pack_hashes([2]))
    (await bench.asked_snapshot()).set_result(KvSnapshot(RANK, EPOCH, EventId(1), (held,)))
    await until(lambda: bench.state() is FeedState.LIVE)
    assert bench.index.held(SLOT) == 1
    bench.ingest.close()
