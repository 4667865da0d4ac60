"""How a worker's events leave it."""

import asyncio
from array import array

import pytest

from kvrouter.core.events import (
    Cleared,
    Held,
    KvBatch,
    KvEvent,
    Medium,
    Removed,
    Stored,
    pack_hashes,
    unpack_hashes,
)
from kvrouter.core.hashing import Prompt, block_hashes, hash_seed, sequence_hashes
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.requests import TokenBuffer
from kvrouter.core.workers import EventSource, EventTransport, KvTransfers, LoadReport
from kvrouter.worker.kv_publisher import KvPublisher, RankMirror

WORKER = WorkerId(3)
RANK = WorkerRank(WORKER, DpRank(0))
EPOCH = Epoch(42)
BLOCK_SIZE = 4
TOKENS = list(range(3 * BLOCK_SIZE))


class Wire:
    def __init__(self) -> None:
        self.batches: list[KvBatch] = []

    @property
    def source(self) -> EventSource:
        return EventSource(EventTransport.MEMORY)

    def publish(self, batch: KvBatch) -> None:
        self.batches.append(batch)

    def publish_load(self, report: LoadReport) -> None:
        raise AssertionError(report)


def publisher_on(wire: Wire, *, ring_events_max: int = 8, pending_events_max: int = 8) -> KvPublisher:
    return KvPublisher(
        wire,
        worker_id=WORKER,
        epoch=EPOCH,
        block_size=BLOCK_SIZE,
        ring_events_max=ring_events_max,
        pending_events_max=pending_events_max,
        wall_clock=lambda: 1.5,
    )


def event(n: int) -> Removed:
    return Removed(pack_hashes([n]))


async def turn() -> None:
    await asyncio.sleep(0)


async def test_events_of_one_loop_turn_are_one_batch_per_rank() -> None:
    wire = Wire()
    publisher = publisher_on(wire)
    publisher.publish(DpRank(0), (event(0),))
    publisher.publish(DpRank(1), (event(9),))
    publisher.publish(DpRank(0), (event(1), event(2)))
    assert wire.batches == []
    await turn()
    publisher.publish(DpRank(0), (event(3),))
    await turn()
    other = WorkerRank(WORKER, DpRank(1))
    assert wire.batches == [
        KvBatch(RANK, EPOCH, EventId(0), (event(0), event(1), event(2)), 1.5),
        KvBatch(other, EPOCH, EventId(0), (event(9),), 1.5),
        KvBatch(RANK, EPOCH, EventId(3), (event(3),), 1.5),
    ]


async def test_a_full_pending_list_is_sent_at_once() -> None:
    wire = Wire()
    publisher = publisher_on(wire, pending_events_max=3)
    for n in range(4):
        publisher.publish(DpRank(0), (event(n),))
    assert [batch.events for batch in wire.batches] == [(event(0), event(1), event(2))]
    await turn()
    assert [batch.first_event_id for batch in wire.batches] == [0, 3]


async def test_the_ring_answers_only_ranges_that_it_still_holds() -> None:
    publisher = publisher_on(Wire(), ring_events_max=4)
    publisher.publish(DpRank(0), tuple(event(n) for n in range(6)))
    publisher.flush()
    answer = publisher.recover_range(RANK, EventId(3), EventId(4))
    assert answer == KvBatch(RANK, EPOCH, EventId(3), (event(3), event(4)), 1.5)
    assert publisher.recover_range(RANK, EventId(2), EventId(5)) is not None
    for first, last in [(1, 3), (4, 6), (5, 4), (-1, 2)]:
        assert publisher.recover_range(RANK, EventId(first), EventId(last)) is None
    assert publisher.recover_range(WorkerRank(WORKER, DpRank(7)), EventId(2), EventId(3)) is None
    assert publisher.recover_range(WorkerRank(WorkerId(8), DpRank(0)), EventId(2), EventId(3)) is None
    await turn()


async def test_a_snapshot_includes_events_published_while_it_is_taken() -> None:
    """An engine may tell of events while it is asked: they are in the snapshot, and not after it."""
    wire = Wire()

    def snapshot(dp_rank: DpRank) -> tuple[KvEvent, ...]:
        publisher.publish(dp_rank, (event(1),))
        return (Stored(None, pack_hashes([5]), pack_hashes([50])),)

    publisher = KvPublisher(wire, worker_id=WORKER, epoch=EPOCH, block_size=BLOCK_SIZE, snapshot=snapshot)
    publisher.publish(DpRank(0), (event(0),))
    answer = publisher.recover_snapshot(RANK)
    assert answer is not None
    assert (answer.epoch, answer.next_event_id) == (EPOCH, 2)
    assert answer.events == (Held(pack_hashes([5]), pack_hashes([50])),)
    assert [batch.events for batch in wire.batches] == [(event(0), event(1))]
    assert publisher.recover_snapshot(WorkerRank(WorkerId(8), DpRank(0))) is None
    await turn()


async def test_a_custom_engine_publishes_with_token_ids_and_engine_hashes() -> None:
    wire = Wire()
    publisher = publisher_on(wire)
    publisher.publish_stored(TOKENS[:8], [100, 101])
    publisher.publish_stored(
        TOKENS[8:], [102], parent=EngineHash(101), lora_name="lora", cache_namespace="team", medium=Medium.CPU
    )
    publisher.publish_removed([100], medium=Medium.GPU)
    publisher.publish_cleared()
    await turn()
    seed = hash_seed(lora_name="lora", cache_namespace="team")
    assert wire.batches[0].events == (
        Stored(None, pack_hashes([100, 101]), block_hashes(TOKENS[:8], block_size=BLOCK_SIZE)),
        Stored(
            EngineHash(101),
            pack_hashes([102]),
            block_hashes(TOKENS[8:], block_size=BLOCK_SIZE, seed=seed),
            Medium.CPU,
        ),
        Removed(pack_hashes([100])),
        Cleared(),
    )


@pytest.mark.parametrize("tokens", [TOKENS[:7], TOKENS[:9], []])
async def test_tokens_that_do_not_fill_the_named_blocks_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="2 blocks of 4 tokens are 8 token ids"):
        publisher_on(Wire()).publish_stored(tokens, [100, 101])


@pytest.mark.parametrize("tokens", [[], array("I")])
async def test_storing_no_blocks_publishes_nothing(tokens: TokenBuffer | list[int]) -> None:
    wire = Wire()
    publisher_on(wire).publish_stored(tokens, [])
    await turn()
    assert wire.batches == []


async def test_a_publisher_without_engine_snapshots_mirrors_its_events() -> None:
    publisher = publisher_on(Wire())
    publisher.publish_stored(TOKENS[:8], [100, 101])
    publisher.publish_stored(TOKENS[8:], [102], parent=EngineHash(101))
    answer = publisher.recover_snapshot(RANK)
    assert answer is not None
    chained = Prompt(TOKENS, block_size=BLOCK_SIZE).sequence_hashes
    assert answer.events == (Held(pack_hashes([100, 101, 102]), chained),)
    await turn()


async def test_a_heartbeat_publishes_the_next_event_id_of_each_rank() -> None:
    wire = Wire()
    publisher = publisher_on(wire)
    publisher.publish(DpRank(0), (event(0),))
    publisher.heartbeat([DpRank(0), DpRank(1)])
    assert [(batch.rank.dp_rank, batch.first_event_id, len(batch.events)) for batch in wire.batches] == [
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
    ]
    await turn()


async def test_a_closed_publisher_is_silent() -> None:
    wire = Wire()
    publisher = publisher_on(wire)
    publisher.publish(DpRank(0), (event(0),))
    publisher.close()
    publisher.publish(DpRank(0), (event(1),))
    publisher.heartbeat([DpRank(0)])
    await turn()
    assert wire.batches == []
    assert publisher.recover_snapshot(RANK) is None
    assert publisher.recover_range(RANK, EventId(0), EventId(0)) is None


def test_the_mirror_counts_stores_and_keeps_media_apart() -> None:
    mirror = RankMirror()
    column = pack_hashes([1])
    stored, on_cpu = (
        Stored(None, column, pack_hashes([11])),
        Stored(None, column, pack_hashes([11]), Medium.CPU),
    )
    mirror.apply((stored, stored, on_cpu, Removed(column)))
    assert mirror.held() == (Held(column, pack_hashes([11])), Held(column, pack_hashes([11]), Medium.CPU))
    mirror.apply((Removed(column), Removed(column), Removed(pack_hashes([99]))))
    assert mirror.held() == (Held(column, pack_hashes([11]), Medium.CPU),)
    mirror.apply((Cleared(),))
    assert mirror.held() == ()


def test_the_mirror_drops_orphans_and_keeps_blocks_after_a_removed_block() -> None:
    mirror = RankMirror()
    chain = Prompt(TOKENS, block_size=BLOCK_SIZE)
    mirror.apply((Stored(None, pack_hashes([1, 2, 3]), chain.block_hashes), Removed(pack_hashes([2]))))
    assert mirror.held() == (
        Held(pack_hashes([1, 3]), pack_hashes([unpack_hashes(chain.sequence_hashes)[i] for i in (0, 2)])),
    )
    mirror.apply((Stored(EngineHash(2), pack_hashes([4]), pack_hashes([44])),))
    assert mirror.held()[0].engine_hashes == pack_hashes([1, 3])


def test_an_engine_hash_with_new_content_resets_its_store_count() -> None:
    mirror = RankMirror()
    column = pack_hashes([1])
    mirror.apply((Stored(None, column, pack_hashes([11])), Stored(None, column, pack_hashes([11]))))
    mirror.apply((Stored(None, column, pack_hashes([22])),))
    assert mirror.held() == (Held(column, pack_hashes([22])),)
    mirror.apply((Removed(column),))
    assert mirror.held() == ()


def test_a_parent_may_be_in_another_medium() -> None:
    mirror = RankMirror()
    mirror.apply((Stored(None, pack_hashes([1]), pack_hashes([11]), Medium.CPU),))
    mirror.apply((Stored(EngineHash(1), pack_hashes([2]), pack_hashes([22])),))
    chained = sequence_hashes(pack_hashes([11, 22]))
    assert mirror.held() == (
        Held(pack_hashes([2]), chained[8:]),
        Held(pack_hashes([1]), pack_hashes([11]), Medium.CPU),
    )


class Loads(Wire):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[LoadReport] = []

    def publish_load(self, report: LoadReport) -> None:
        self.loads.append(report)


async def test_loads_name_their_rank_and_end_when_the_publisher_closes() -> None:
    wire = Loads()
    publisher = publisher_on(wire)
    publisher.publish_load(active_blocks=3, total_blocks=8, running_requests=1, dp_rank=DpRank(2))
    fetched = KvTransfers(2, 1000, 0.5)
    publisher.publish_load(active_blocks=3, total_blocks=8, kv_transfers=fetched)
    publisher.close()
    publisher.publish_load(active_blocks=4, total_blocks=8)
    rank = WorkerRank(WORKER, DpRank(2))
    assert wire.loads == [
        LoadReport(rank, active_blocks=3, total_blocks=8, running_requests=1),
        LoadReport(RANK, active_blocks=3, total_blocks=8, kv_transfers=fetched),
    ]


async def test_heartbeats_repeat_each_ranks_latest_load_until_it_is_dropped() -> None:
    """An engine that reports changes alone says nothing more: a router that joins later would never know."""
    wire = Loads()
    publisher = publisher_on(wire)
    publisher.publish_load(active_blocks=9, total_blocks=10)
    publisher.publish_load(active_blocks=0, total_blocks=10)
    publisher.publish_load(active_blocks=4, total_blocks=10, dp_rank=DpRank(1))
    del wire.loads[:]
    idle, other = LoadReport(RANK, 0, 10), LoadReport(WorkerRank(WORKER, DpRank(1)), 4, 10)
    publisher.heartbeat([])
    assert wire.loads == [idle, other]
    publisher.drop_load(dp_rank=DpRank(1))
    publisher.heartbeat([])
    assert wire.loads == [idle, other, idle]
    publisher.close()
    publisher.heartbeat([])
    assert wire.loads == [idle, other, idle]


async def test_a_heartbeat_counts_the_blocks_of_its_rank() -> None:
    wire = Wire()
    publisher = publisher_on(wire)
    publisher.publish_stored(TOKENS, [1, 2, 3])
    publisher.publish_removed([3])
    publisher.heartbeat([DpRank(0)])
    assert [(batch.next_event_id, batch.held_blocks) for batch in wire.batches] == [(2, None), (2, 2)]


async def test_a_heartbeat_count_includes_events_reported_while_counting() -> None:
    wire = Wire()

    def held_blocks(dp_rank: DpRank) -> int:
        publisher.publish(dp_rank, (event(0),))
        return 7

    publisher = KvPublisher(
        wire,
        worker_id=WORKER,
        epoch=EPOCH,
        block_size=BLOCK_SIZE,
        snapshot=lambda _dp_rank: (),
        held_blocks=held_blocks,
    )
    publisher.heartbeat([DpRank(0)])
    assert [(batch.next_event_id, batch.held_blocks) for batch in wire.batches] == [(1, None), (1, 7)]
