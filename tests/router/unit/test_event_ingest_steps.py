"""What a rank of many blocks does to everybody else: nothing, because the index works for it step by step."""

import asyncio

import numpy as np
import pytest

from kvrouter.core.events import Cleared, Held, KvBatch, KvEvent, KvSnapshot, Removed, Stored, pack_hashes
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.router import event_ingest, index_work, rank_ingest
from kvrouter.router.index_work import STEP_BLOCKS, STEP_EVENTS, Steps
from kvrouter.transports.events.encoding import decode_batch, encode_batch
from kvrouter.transports.events.port import AnswerTooLarge
from tests.router.unit.test_event_ingest import (
    EPOCH,
    OTHER,
    OTHER_SLOT,
    PROMPT,
    RANK,
    SLOT,
    Bench,
    batch,
    stored,
)
from tests.testing.calls import MakeFail
from tests.testing.constants import SetConstants
from tests.testing.waits import until

N_BLOCKS = 40 * STEP_BLOCKS
SHARD_BLOCKS = 2 * STEP_BLOCKS
"""More than the index forgets in one call."""


def many(seed: int = 1, n_blocks: int = N_BLOCKS) -> Held:
    names, sequences = np.random.default_rng(seed).integers(0, 2**64, (2, n_blocks), dtype=np.uint64)
    return Held(names.tobytes(), sequences.tobytes())


async def big(bench: Bench, held: Held, rank: WorkerRank = RANK, slot: Slot = SLOT) -> None:
    """A rank joins and tells of more than one step can place."""
    asked = len(bench.subscriber.snapshots)
    bench.ingest.joined(rank, slot, EPOCH)
    await until(lambda: len(bench.subscriber.snapshots) > asked)
    bench.subscriber.snapshots[-1][1].set_result(KvSnapshot(rank, EPOCH, EventId(5), (held,)))
    await until(lambda: bench.index.held(slot) > 0)
    assert bench.index.held(slot) < held.n_blocks


class Turns:
    """Watches the index from one turn of the event loop to the next, asking for overlaps as requests do."""

    def __init__(self, bench: Bench, slot: Slot = SLOT) -> None:
        self.bench = bench
        self.slot = slot
        self.turns = 0
        self.largest_step = 0

    async def until_live(self) -> None:
        held = self.bench.index.held(self.slot)
        while self.bench.state(self.slot) is not FeedState.LIVE:
            assert self.bench.overlap()[self.slot] == 0, "what is half done scores nothing"
            await asyncio.sleep(0)
            self.turns += 1
            held, before = self.bench.index.held(self.slot), held
            self.largest_step = max(self.largest_step, abs(held - before))


async def test_other_ranks_score_and_update_between_steps_of_a_large_load() -> None:
    bench = Bench()
    await bench.join(OTHER, OTHER_SLOT)
    bench.ingest.on_batch(batch(0, stored(0, 3), rank=OTHER))
    held = many()
    await big(
        bench, Held(held.engine_hashes + pack_hashes([7]), held.sequence_hashes + PROMPT.sequence_hashes[:8])
    )
    n_others = 0
    while bench.state() is not FeedState.LIVE:
        assert bench.overlap() == [0, 3]
        bench.ingest.on_batch(batch(1 + n_others, Cleared(), stored(0, 3), rank=OTHER))
        n_others += 2
        before = bench.index.held(SLOT)
        await asyncio.sleep(0)
        assert bench.index.held(SLOT) - before <= STEP_BLOCKS
    assert n_others / 2 >= N_BLOCKS // STEP_BLOCKS - 2, "a turn of the others for each step"
    assert bench.index.held(SLOT) == N_BLOCKS + 1
    assert bench.overlap() == [1, 3]
    assert bench.telemetry.feed_events.value("mock", "blocks_stored") >= N_BLOCKS


async def test_batches_arriving_during_a_load_are_applied_after_it() -> None:
    bench = Bench()
    await big(bench, many())
    bench.ingest.on_batch(batch(5, stored(0, 2)))
    bench.ingest.on_batch(batch(6, stored(2, 1, parent=101)))
    assert bench.overlap() == [0, 0]
    await until(lambda: bench.state() is FeedState.LIVE)
    assert bench.overlap() == [3, 0]
    assert bench.index.held(SLOT) == N_BLOCKS + 3


async def test_a_cleared_large_rank_scores_nothing_until_it_is_emptied() -> None:
    bench = Bench()
    await big(bench, many())
    await until(lambda: bench.state() is FeedState.LIVE)
    bench.ingest.on_batch(batch(5, stored(0, 4)))
    assert bench.overlap() == [4, 0]
    bench.ingest.on_batch(batch(6, Cleared(), stored(0, 1)))
    assert bench.state() is FeedState.RECOVERING
    turns = Turns(bench)
    await turns.until_live()
    assert bench.overlap() == [1, 0]
    assert (turns.turns > N_BLOCKS / SHARD_BLOCKS, turns.largest_step <= SHARD_BLOCKS) == (True, True)
    assert bench.telemetry.feed_events.value("mock", "blocks_cleared") == N_BLOCKS + 4


async def test_a_large_snapshot_replaces_another_step_by_step() -> None:
    bench = Bench()
    await big(bench, many())
    await until(lambda: bench.state() is FeedState.LIVE)
    bench.ingest.on_batch(batch(7, stored(0, 1)))
    (await bench.asked_range())[2].set_result(None)
    await until(lambda: len(bench.subscriber.snapshots) == 2)
    held = many(seed=2)
    (await bench.asked_snapshot()).set_result(KvSnapshot(RANK, EPOCH, EventId(9), (held,)))
    turns = Turns(bench)
    await turns.until_live()
    assert turns.largest_step <= SHARD_BLOCKS
    assert bench.index.held(SLOT) == N_BLOCKS
    assert bench.telemetry.feed_events.value("mock", "blocks_cleared") == N_BLOCKS


async def test_an_exception_during_a_load_asks_for_a_new_snapshot(
    make_fail: MakeFail,
) -> None:
    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    bench = Bench()
    held = many()
    await big(bench, held)
    mistake = RuntimeError("of ours")
    make_fail(index_work, "Held", mistake, at_call=0)
    await until(lambda: len(bench.subscriber.snapshots) == 2)
    assert shown == [mistake]
    assert bench.overlap() == [0, 0]
    bench.subscriber.snapshots[-1][1].set_result(KvSnapshot(RANK, EPOCH, EventId(5), (held,)))
    await until(lambda: bench.state() is FeedState.LIVE)
    assert bench.index.held(SLOT) == N_BLOCKS


async def test_a_slot_can_be_joined_while_its_old_blocks_are_dropped() -> None:
    bench = Bench()
    await big(bench, many())
    await until(lambda: bench.state() is FeedState.LIVE)
    bench.ingest.freed(SLOT)
    assert 0 < bench.index.held(SLOT) < N_BLOCKS
    assert bench.ingest.all_score
    bench.ingest.joined(OTHER, SLOT, EPOCH)
    bench.ingest.on_batch(batch(0, stored(0, 2), rank=OTHER))  # its stream from the beginning
    turns = Turns(bench)
    await turns.until_live()
    assert bench.index.held(SLOT) == 2
    assert bench.overlap() == [2, 0]
    bench.ingest.close()


async def test_a_rank_freed_during_its_load_leaves_no_blocks() -> None:
    bench = Bench()
    await big(bench, many())
    bench.ingest.freed(SLOT)
    await until(lambda: bench.index.stats().blocks[0] == 0)
    assert bench.ingest.all_score
    await bench.join(OTHER, OTHER_SLOT)
    assert bench.index.stats().blocks[0] == 0


async def test_a_worker_restarting_during_its_load_keeps_no_old_blocks() -> None:
    bench = Bench()
    await big(bench, many())
    bench.ingest.freed(SLOT)
    bench.ingest.joined(RANK, SLOT, Epoch(8))
    bench.ingest.on_batch(batch(5, stored(0, 3)))  # of the start that is over
    bench.ingest.on_batch(batch(0, stored(0, 1), epoch=Epoch(8)))
    held = Held(pack_hashes([100]), PROMPT.sequence_hashes[:8])
    for n_asked in (2, 3):  # once more, because a batch of another start came after the question
        await until(lambda: len(bench.subscriber.snapshots) == n_asked)  # noqa: B023 - at once
        (await bench.asked_snapshot()).set_result(KvSnapshot(RANK, Epoch(8), EventId(1), (held,)))
    await until(lambda: bench.state() is FeedState.LIVE)
    assert bench.overlap() == [1, 0]
    bench.ingest.close()


async def test_batches_over_the_waiting_limit_are_dropped_and_asked_for(
    set_constants: SetConstants,
) -> None:
    set_constants(rank_ingest, WAITING_EVENTS_MAX=3)
    bench = Bench()
    await big(bench, many())
    events: list[KvEvent] = [stored(0, 1), stored(1, 1, parent=100), Cleared(), stored(0, 2)]
    for number, event in enumerate(events):
        bench.ingest.on_batch(batch(5 + number, event))
    assert bench.telemetry.feed_events.value("mock", "inbox_full") == 1
    await until(lambda: bench.state() is FeedState.LIVE)
    bench.ingest.on_batch(batch(9))
    assert bench.state() is FeedState.RECOVERING
    first, last, answer = await bench.asked_range()
    assert (first, last) == (8, 8)
    answer.set_result(batch(8, stored(0, 2)))
    await until(lambda: bench.state() is FeedState.LIVE)
    assert bench.overlap() == [2, 0]


async def test_a_snapshot_read_step_by_step_excludes_later_batches() -> None:
    bench = Bench()
    held = many()
    await big(bench, held)
    await until(lambda: bench.state() is FeedState.LIVE)
    taking = asyncio.create_task(bench.ingest.snapshot(SLOT))
    await asyncio.sleep(0)
    bench.ingest.on_batch(batch(5, stored(0, 2)))
    assert bench.state() is FeedState.LIVE, "it scores what it is known to hold"
    assert bench.overlap() == [0, 0]
    assert await bench.ingest.snapshot(SLOT) is None, "one at a time"
    taken = await taking
    assert taken is not None
    assert (taken.rank, taken.epoch, taken.next_event_id) == (RANK, EPOCH, 5)
    assert sum(part.n_blocks for part in taken.events) == N_BLOCKS
    names = np.concatenate([np.frombuffer(part.engine_hashes, np.uint64) for part in taken.events])
    assert sorted(names) == sorted(np.frombuffer(held.engine_hashes, np.uint64))
    await until(lambda: bench.overlap() == [2, 0])


async def test_a_rank_freed_while_it_is_read_has_no_snapshot() -> None:
    bench = Bench()
    await big(bench, many())
    assert await bench.ingest.snapshot(SLOT) is None, "not while it is loaded"
    await until(lambda: bench.state() is FeedState.LIVE)
    taking = asyncio.create_task(bench.ingest.snapshot(SLOT))
    await asyncio.sleep(0)
    bench.ingest.freed(SLOT)
    assert await taking is None


async def test_a_doubt_during_the_reading_of_a_rank_does_not_disturb_it() -> None:
    bench = Bench()
    await big(bench, many())
    await until(lambda: bench.state() is FeedState.LIVE)
    taking = asyncio.create_task(bench.ingest.snapshot(SLOT))
    await asyncio.sleep(0)
    bench.ingest.doubt(SLOT)
    bench.ingest.on_batch(batch(5, stored(0, 2)))
    async with asyncio.timeout(60.0):
        taken = await taking
    assert taken is not None
    assert sum(part.n_blocks for part in taken.events) == N_BLOCKS
    await until(lambda: bench.overlap() == [2, 0])


async def test_a_rank_whose_reading_raises_has_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    bench = Bench()
    await bench.join()
    mistake = RuntimeError("of ours")

    def listed(_index: object, _slot: Slot, held: list[Held]) -> Steps:
        held.append(many(n_blocks=1))
        yield
        raise mistake

    monkeypatch.setattr(event_ingest, "listed", listed)
    assert await bench.ingest.snapshot(SLOT) is None
    assert shown == [mistake]


async def test_concurrent_snapshot_questions_are_limited() -> None:
    bench = Bench(snapshots_asked_max=2)
    ranks = [WorkerRank(WorkerId(10 + number), DpRank(0)) for number in range(5)]
    for slot, rank in enumerate(ranks):
        bench.ingest.joined(rank, Slot(slot), EPOCH)
    await until(lambda: len(bench.subscriber.snapshots) == 2)
    await asyncio.sleep(0.01)
    assert len(bench.subscriber.snapshots) == 2
    feeds = dict(bench.ingest.feeds())
    assert [feeds[Slot(slot)].next_timeout_s is None for slot in range(5)] == [False, False, True, True, True]
    for n_answered, rank in enumerate(ranks, start=1):
        asked, answer = bench.subscriber.snapshots[n_answered - 1]
        assert asked == rank, "in the order of joining"
        answer.set_result(KvSnapshot(rank, EPOCH, EventId(1), (many(seed=n_answered),)))
        await until(lambda: bench.state(Slot(n_answered - 1)) is FeedState.LIVE)  # noqa: B023 - at once
        await until(lambda: len(bench.subscriber.snapshots) == min(5, 2 + n_answered))  # noqa: B023
    assert bench.ingest.all_score


async def test_a_range_question_is_cancelled_when_the_gap_closes() -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.on_batch(
        KvBatch(RANK, EPOCH, EventId(1), (Stored(None, pack_hashes([1]), pack_hashes([1])),))
    )
    _, _, answer = await bench.asked_range()
    bench.ingest.on_batch(batch(0, stored(0, 1)))  # it was only late
    assert bench.state() is FeedState.LIVE
    await until(answer.cancelled)


def stored_run(first: int, n_blocks: int, *, parent: int | None = None) -> Stored:
    """So many blocks of some sequence; the engine calls the i-th one ``first + i``."""
    names = np.arange(first, first + n_blocks, dtype=np.uint64)
    return Stored(None if parent is None else EngineHash(parent), names.tobytes(), (names * 7).tobytes())


async def test_a_large_batch_applied_in_steps_equals_one_application() -> None:
    bench, whole = Bench(), NativeBlockIndex()
    await bench.join(OTHER, OTHER_SLOT)
    bench.ingest.on_batch(batch(0, stored(0, 3), rank=OTHER))
    await bench.join()
    events = (
        stored_run(1, N_BLOCKS),
        stored_run(1 + N_BLOCKS, 3 * STEP_BLOCKS + 5, parent=N_BLOCKS),
        Removed(np.arange(5, 5 + 2 * STEP_BLOCKS, dtype=np.uint64).tobytes()),
    )
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(0), events))
    turns = Turns(bench)
    while bench.state() is not FeedState.LIVE:
        assert bench.overlap()[OTHER_SLOT] == 3
        before = bench.index.held(SLOT)
        await asyncio.sleep(0)
        turns.largest_step = max(turns.largest_step, abs(bench.index.held(SLOT) - before))
    assert 0 < turns.largest_step <= STEP_BLOCKS
    whole.apply(SLOT, events)
    assert bench.index.dump(SLOT) == whole.dump(SLOT)
    bench.ingest.close()


async def test_a_batch_of_many_small_events_is_applied_in_steps() -> None:
    bench = Bench()
    await bench.join()
    blocks = [stored_run(seed, 1) for seed in range(3 * STEP_EVENTS)]
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(0), tuple(blocks)))
    assert bench.index.held(SLOT) == STEP_EVENTS
    await until(lambda: bench.state() is FeedState.LIVE)
    assert bench.index.held(SLOT) == 3 * STEP_EVENTS
    bench.ingest.close()


async def test_a_frame_of_many_small_events_is_applied_in_one_step() -> None:
    bench = Bench()
    await bench.join()
    blocks = [stored_run(seed, 1) for seed in range(STEP_BLOCKS)]
    bench.ingest.on_batch(decode_batch(encode_batch(KvBatch(RANK, EPOCH, EventId(0), tuple(blocks)))))
    assert (bench.state(), bench.index.held(SLOT)) == (FeedState.LIVE, STEP_BLOCKS)
    bench.ingest.close()


@pytest.mark.parametrize("n_more", [1, 3 * STEP_BLOCKS])
async def test_a_frame_of_too_many_events_is_applied_in_steps(n_more: int) -> None:
    bench, whole = Bench(), NativeBlockIndex()
    await bench.join()
    blocks = [stored_run(seed, 1) for seed in range(STEP_BLOCKS)]
    batch = KvBatch(RANK, EPOCH, EventId(0), (*blocks, Cleared(), stored_run(0, n_more), *blocks))
    bench.ingest.on_batch(decode_batch(encode_batch(batch)))
    assert 0 < bench.index.held(SLOT) <= STEP_BLOCKS
    await until(lambda: bench.state() is FeedState.LIVE)
    whole.apply(SLOT, batch.events)
    assert bench.index.dump(SLOT) == whole.dump(SLOT)
    bench.ingest.close()


async def test_a_rank_with_many_steps_does_not_delay_another_rank() -> None:
    bench = Bench()
    await bench.join()
    await bench.join(OTHER, OTHER_SLOT)
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(0), (stored_run(1, N_BLOCKS),)))
    bench.ingest.on_batch(KvBatch(OTHER, EPOCH, EventId(0), (stored_run(1, 3 * STEP_BLOCKS),)))
    await until(lambda: bench.state(OTHER_SLOT) is FeedState.LIVE)
    assert bench.state() is FeedState.RECOVERING
    bench.ingest.close()


async def test_a_rank_over_its_block_limit_is_emptied_and_asked_again_later() -> None:
    bench = Bench()
    await bench.join(OTHER, OTHER_SLOT)
    bench.ingest.on_batch(batch(0, stored(0, 3), rank=OTHER))
    await bench.join()
    bench.ingest.set_total_blocks(SLOT, 2 * STEP_BLOCKS)
    bench.ingest.on_batch(batch(0, stored(0, 3)))
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(1), (stored_run(1, N_BLOCKS),)))
    most = 0
    while bench.state() is not FeedState.OVER_LIMIT:
        most = max(most, bench.index.held(SLOT))
        await asyncio.sleep(0)
    assert most <= (2 * 2 + 2) * STEP_BLOCKS, "not much beyond twice what its card says"
    assert bench.overlap() == [0, 3]
    assert bench.index.held(SLOT) == 0
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(2), (stored_run(1, 5),)))
    assert (bench.index.held(SLOT), bench.state()) == (0, FeedState.OVER_LIMIT)
    asked = len(bench.subscriber.snapshots)
    bench.later_s = 61.0
    (entrance_there,) = (each for each in bench.ingest._rank_ingests.values() if each.slot == SLOT)
    bench.ingest._timed_out(entrance_there)
    await until(lambda: len(bench.subscriber.snapshots) > asked)
    snapshot = KvSnapshot(RANK, EPOCH, EventId(3), ())
    bench.subscriber.snapshots[-1][1].set_result(snapshot)
    await until(lambda: bench.state() is FeedState.LIVE)
    bench.ingest.close()


@pytest.mark.parametrize("reported", [None, 0])
async def test_a_card_without_total_blocks_does_not_limit_its_rank(reported: int | None) -> None:
    bench = Bench()
    await bench.join()
    bench.ingest.set_total_blocks(SLOT, reported)
    bench.ingest.on_batch(KvBatch(RANK, EPOCH, EventId(0), (stored_run(1, 4 * STEP_BLOCKS),)))
    await until(lambda: bench.state() in (FeedState.LIVE, FeedState.OVER_LIMIT))
    assert bench.index.held(SLOT) == 4 * STEP_BLOCKS
    bench.ingest.close()


async def test_a_rank_with_a_too_large_snapshot_is_over_its_limit() -> None:
    bench = Bench()
    bench.ingest.joined(RANK, SLOT, EPOCH)
    bench.ingest.set_total_blocks(SLOT, 16_384)
    await until(lambda: len(bench.subscriber.snapshots) == 1)
    assert bench.subscriber.blocks_max == (2 + 3 * 64) * 16_384
    bench.subscriber.snapshots[0][1].set_exception(
        AnswerTooLarge("answer: 600000000 bytes", param="total_bytes")
    )
    await until(lambda: bench.state() is FeedState.OVER_LIMIT)
    assert bench.telemetry.feed_events.value("mock", "over_limit") == 1
    assert not bench.ingest.all_score
    bench.ingest.close()


async def test_waiting_batches_are_bounded_in_blocks() -> None:
    waiting = rank_ingest.WaitingBatches()
    large = KvBatch(RANK, EPOCH, EventId(0), (stored_run(1, 200_000),))
    n_kept = sum(waiting.add(large) for _ in range(60))
    assert 1 <= n_kept <= 5


@pytest.mark.parametrize(("n_ranks", "share"), [(1, 1_000_000), (4, 1_000_000), (16, 250_000)])
async def test_ranks_of_a_worker_share_its_block_limit_equally(n_ranks: int, share: int) -> None:
    bench = Bench(rank_blocks_max=1_000_000)
    bench.ingest.joined(RANK, SLOT, EPOCH)
    bench.ingest.set_total_blocks(SLOT, None, n_ranks=n_ranks)
    await until(lambda: len(bench.subscriber.snapshots) == 1)
    assert bench.subscriber.blocks_max == 4 * share
    bench.ingest.close()
