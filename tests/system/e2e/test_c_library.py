"""The C library against a real door: what it refuses, and that the worker ends with what the engine holds."""

import asyncio
import ctypes
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrouter.core.events import Cleared, KvEvent, Medium, Removed, Stored, pack_hashes
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.ids import DpRank, EngineHash, Slot, WorkerRank
from kvrouter.core.workers import LoadReport
from tests.oracles.index import NaiveBlockIndex
from tests.testing.c_engine import (
    FULL,
    INVALID,
    OK,
    TIMEOUT,
    UNKNOWN_PARENT,
    CEngine,
    Config,
    State,
    calls,
    config,
    open_with,
)
from tests.testing.engine_door import (
    BLOCK_SIZE,
    DP_RANKS,
    TOKEN,
    WORKER,
    EngineDoorHarness,
    block_counts,
    open_engine_door,
)
from tests.testing.waits import until

FLUSH_MS = 60_000
"""Only a test that fails waits as long as this."""

NOBODY = "unix:/nobody/listens/here"


@contextmanager
def engine(configured: Config) -> Iterator[CEngine]:
    opened = CEngine(configured)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[EngineDoorHarness]:
    async with open_engine_door(f"unix:{tmp_path}/door") as here:
        yield here


async def flush(opened: CEngine) -> None:
    assert await asyncio.to_thread(opened.flush, FLUSH_MS) == OK, opened.status().error


def tokens(n_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + n_blocks * BLOCK_SIZE))


class Truth:
    """What the engine holds, kept next to the library."""

    def __init__(self, seed: int) -> None:
        self.index = NaiveBlockIndex()
        self.draw = random.Random(seed)

    def step(self, opened: CEngine, dp_rank: DpRank) -> None:
        """Do one thing, to both."""
        draw = self.draw
        medium = draw.choice((Medium.GPU, Medium.GPU, Medium.CPU))
        names = [draw.randrange(30) for _ in range(draw.randint(1, 5))]
        what = draw.random()
        event: KvEvent
        if what < 0.6:
            token_ids = [draw.randrange(3) for _ in range(len(names) * BLOCK_SIZE)]
            parent = draw.choice((None, draw.randrange(30)))
            lora = draw.choice((None, "lora"))
            code = opened.stored(
                token_ids, names, parent=parent, dp_rank=dp_rank, medium=medium, lora_name=lora
            )
            hashes = block_hashes(token_ids, block_size=BLOCK_SIZE, seed=hash_seed(lora_name=lora))
            event = Stored(None if parent is None else EngineHash(parent), pack_hashes(names), hashes, medium)
        elif what < 0.98:
            event = Removed(pack_hashes(names), medium)
            code = opened.removed(names, dp_rank=dp_rank, medium=medium)
        else:
            event = Cleared()
            code = opened.cleared(dp_rank=dp_rank)
        applied = self.index.apply(Slot(dp_rank), (event,))
        assert code == (UNKNOWN_PARENT if applied.orphaned else OK)

    def is_known(self, harness: EngineDoorHarness) -> None:
        """Routers that heard everything, and ones that heard nothing, believe the truth."""
        for dp_rank in DP_RANKS:
            held = block_counts(tuple(self.index.dump(Slot(dp_rank))))
            assert harness.believed(dp_rank) == held
            assert harness.answered(dp_rank) == held
        assert harness.orphaned == 0


@pytest.mark.parametrize(
    ("configured", "says"),
    [
        (config("/no/scheme"), "neither unix:/path nor tcp://host:port"),
        (config("tcp://host"), "is not tcp://host:port"),
        (config("unix:relative"), "absolute path"),
        (config(NOBODY, block_size=0), "block_size: must be at least 1"),
        (config(NOBODY, token="x" * 1025), "token: is longer than 1024 bytes"),
        (Config(8), "struct_bytes: 8 is not"),
    ],
)
def test_c_library_refuses_invalid_configurations_with_a_message(configured: Config, says: str) -> None:
    publisher, error = open_with(configured)
    assert publisher is None
    assert says in error


def test_c_library_refuses_invalid_arguments_without_effect() -> None:
    with engine(config(NOBODY, held_blocks_max=3)) as opened:
        assert opened.stored(tokens(2)[:-1], [1, 2]) == INVALID
        assert opened.stored(tokens(1), [1], medium=4) == INVALID
        assert opened.stored(tokens(1), [1], medium=-1) == INVALID
        assert opened.stored(tokens(1), [1], dp_rank=4096) == INVALID
        assert opened.stored(tokens(1), [1], parent=9) == UNKNOWN_PARENT
        assert opened.stored([], []) == OK
        assert opened.removed([], medium=4) == INVALID
        assert calls().kvr_stored(None, 0, None, 0, None, 0, None, None, None, 0) == INVALID
        assert calls().kvr_removed(opened.pointer, 0, None, ctypes.c_size_t(2), 0) == INVALID
        assert calls().kvr_load(opened.pointer, 0, None) == INVALID
        assert calls().kvr_status(opened.pointer, ctypes.byref(State(8))) == INVALID
        assert opened.stored(tokens(3), [1, 2, 3]) == OK
        assert opened.stored(tokens(1, first=100), [4]) == FULL
        assert opened.removed([3, 77]) == OK
        state = opened.status()
        assert (state.held_blocks, state.unknown_parents, state.unknown_removed) == (2, 1, 1)
        assert opened.flush(1) == TIMEOUT
    calls().kvr_close(None)


async def test_the_worker_ends_with_the_blocks_that_the_engine_holds(harness: EngineDoorHarness) -> None:
    with engine(config(harness.door.address, token=TOKEN)) as opened:
        truth = Truth(1)
        for _ in range(20):
            for _ in range(40):
                truth.step(opened, truth.draw.choice(DP_RANKS))
            await flush(opened)
            truth.is_known(harness)
        assert opened.status().connections == 1
        assert opened.status().overflows == 0
    await until(lambda: not harness.door.dp_ranks)
    await asyncio.sleep(0)
    for dp_rank in DP_RANKS:
        assert not harness.believed(dp_rank)


async def test_events_lost_on_overflow_or_reconnect_are_reported_again(harness: EngineDoorHarness) -> None:
    """A queue that takes two or three calls, and a door that shuts now and then."""
    with engine(config(harness.door.address, token=TOKEN, queue_bytes_max=200)) as opened:
        truth = Truth(2)
        for round_ in range(12):
            for _ in range(60):
                truth.step(opened, truth.draw.choice(DP_RANKS))
                if truth.draw.random() < 0.1:
                    await asyncio.sleep(0)
            if round_ % 3 == 1:
                await harness.door.stop()
                await harness.door.start()
            await flush(opened)
            truth.is_known(harness)
        state = opened.status()
        assert state.overflows > 0
        assert state.dropped_events >= state.overflows
        assert state.connections == 5


async def test_several_threads_may_publish_at_once(harness: EngineDoorHarness) -> None:
    with engine(config(harness.door.address, token=TOKEN)) as opened:
        truths = {dp_rank: Truth(dp_rank) for dp_rank in DP_RANKS}

        def work(dp_rank: DpRank) -> None:
            for _ in range(500):
                truths[dp_rank].step(opened, dp_rank)

        threads = [threading.Thread(target=work, args=(dp_rank,)) for dp_rank in DP_RANKS]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await flush(opened)
        for dp_rank in DP_RANKS:
            held = block_counts(tuple(truths[dp_rank].index.dump(Slot(dp_rank))))
            assert harness.believed(dp_rank) == held


async def test_c_library_block_hashes_equal_the_routers(harness: EngineDoorHarness) -> None:
    with engine(config(harness.door.address, token=TOKEN)) as opened:
        opened.stored(tokens(2), [1, 2], lora_name="lora", cache_namespace="team", medium=Medium.DISK)
        await flush(opened)
        seed = hash_seed(lora_name="lora", cache_namespace="team")
        hashes = block_hashes(tokens(2), block_size=BLOCK_SIZE, seed=seed)
        events = [event for batch in harness.batches for event in batch.events if isinstance(event, Stored)]
        assert events == [Stored(None, pack_hashes([1, 2]), hashes, Medium.DISK)]


async def test_a_store_longer_than_a_frame_arrives_completely(harness: EngineDoorHarness) -> None:
    names = list(range(5000))
    with engine(config(harness.door.address, token=TOKEN)) as opened:
        for _ in range(2):
            opened.stored(tokens(len(names)), names)
            await flush(opened)
        assert set(harness.believed(DP_RANKS[0]).values()) == {2}
        assert len(harness.believed(DP_RANKS[0])) == len(names)
        await harness.door.stop()
        await harness.door.start()
        await flush(opened)
        assert set(harness.believed(DP_RANKS[0]).values()) == {2}
        assert len(harness.believed(DP_RANKS[0])) == len(names)
    assert harness.orphaned == 0


async def test_the_latest_load_is_sent_again_on_a_new_connection(
    harness: EngineDoorHarness,
) -> None:
    with engine(config(harness.door.address, token=TOKEN)) as opened:
        for blocks in (1, 2, 3):
            opened.load(active_blocks=blocks, total_blocks=9, dp_rank=1)
        await flush(opened)
        latest = LoadReport(
            WorkerRank(WORKER, DpRank(1)),
            active_blocks=3,
            total_blocks=9,
            active_prefill_tokens=0,
            running_requests=1,
        )
        assert harness.loads[-1] == latest
        n_loads = len(harness.loads)
        await harness.door.stop()
        await harness.door.start()
        await until(lambda: len(harness.loads) > n_loads)
        assert harness.loads[-1] == latest


@pytest.mark.parametrize(
    ("token", "block_size", "says"),
    [
        ("another", BLOCK_SIZE, "refused: its token is not the worker's"),
        (TOKEN, BLOCK_SIZE + 1, "refused: its block_size is 5 tokens, the worker's 4"),
    ],
)
async def test_a_refused_connection_has_its_reason_in_the_status(
    harness: EngineDoorHarness, token: str, block_size: int, says: str
) -> None:
    with engine(config(harness.door.address, token=token, block_size=block_size)) as opened:
        await until(lambda: opened.status().error.decode() == says)
        assert not opened.status().connected
        assert opened.flush(1) == TIMEOUT


async def test_an_unknown_dp_rank_ends_the_connection(harness: EngineDoorHarness) -> None:
    with engine(config(harness.door.address, token=TOKEN)) as opened:
        opened.stored(tokens(1), [1], dp_rank=5)
        await until(lambda: opened.status().error == b"refused: the worker has no dp_rank 5")
    assert not harness.door.dp_ranks


async def test_a_newer_connection_takes_over_its_dp_rank(harness: EngineDoorHarness) -> None:
    with engine(config(harness.door.address, token=TOKEN)) as old:
        old.stored(tokens(1), [1])
        await flush(old)
        with engine(config(harness.door.address, token=TOKEN)) as new:
            new.stored(tokens(2), [10, 11])
            await flush(new)
            assert {name for _, name, _ in harness.believed(DP_RANKS[0])} == {10, 11}
            await until(lambda: not old.status().connected)
            assert b"a newer connection tells of dp_rank 0" in old.status().error


def test_closing_does_not_wait_for_an_unreachable_door() -> None:
    for address in (NOBODY, "tcp://127.0.0.1:9"):
        with engine(config(address)) as opened:
            opened.stored(tokens(1), [1])
