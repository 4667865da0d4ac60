"""From a worker's publisher over a bad wire into the router's index: in the end the index holds the truth."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.events import KvBatch, KvSnapshot, unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.worker import KvPublisher
from tests.testing.blocks import blocks

WORKER = WorkerId(1)
RANK = WorkerRank(WORKER, DpRank(0))
SLOT = Slot(0)
PROMPTS = [[prompt, *range(1, 4 + prompt)] for prompt in range(4)]
STEPS = st.lists(
    st.sampled_from(["store", "remove", "clear", "turn", "turn", "release", "restart", "discover"]),
    max_size=40,
)


class BadWire(MemoryEventTransport):
    """Loses, repeats and holds back batches, and sometimes has no range to answer with."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.is_bad = True
        self._chance = chance
        self._held_back: list[KvBatch] = []

    def publish(self, batch: KvBatch) -> None:
        fate = self._chance.choice(["", "", "", "lost", "twice", "held back"]) if self.is_bad else ""
        if fate == "held back":
            self._held_back.append(batch)
        for _ in range({"lost": 0, "held back": 0, "twice": 2}.get(fate, 1)):
            super().publish(batch)

    def release(self) -> None:
        """What was held back arrives, late and in any order."""
        batches, self._held_back = self._held_back, []
        self._chance.shuffle(batches)
        for batch in batches:
            super().publish(batch)

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        await asyncio.sleep(0)
        answer = await super().recover_range(rank, first, last)
        return answer if self._chance.random() < 0.7 else None

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:
        answer = await super().recover_snapshot(rank, blocks_max=blocks_max)
        await asyncio.sleep(0)  # batches overtake the answer
        return answer


class Rig:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.wire = BadWire(self.chance)
        self.index = NativeBlockIndex()
        self.ingest = EventIngest(self.index, self.wire, ModelInstrumentation(Telemetry(), "m"))
        self.wire.subscribe(self.ingest.on_batch, lambda _report: None)
        self.epochs: Iterator[int] = iter(self.chance.sample(range(1000), 50))
        self.start_worker()
        self.ingest.joined(RANK, SLOT, self.publisher.epoch)
        self.discovered = self.publisher.epoch

    def start_worker(self) -> None:
        """A new start: the old publisher is silent, and its blocks are gone."""
        self.held: list[int] = []
        epoch = Epoch(next(self.epochs))
        self.publisher = KvPublisher(self.wire, worker_id=WORKER, epoch=epoch, block_size=1)
        self.wire.serve_recovery(WORKER, self.publisher)

    async def step(self, name: str) -> None:
        match name:
            case "store":
                self.store(self.chance.choice(PROMPTS))
            case "remove" if self.held:
                self.publisher.publish_removed([self.held.pop(self.chance.randrange(len(self.held)))])
            case "clear":
                self.publisher.publish_cleared()
                self.held.clear()
            case "turn":
                await asyncio.sleep(0)
            case "release":
                self.wire.release()
            case "restart":
                self.publisher.close()
                self.start_worker()
            case "discover":
                self.discover()

    def discover(self) -> None:
        """Discovery tells of the worker's present start; it may be late, and the wire faster."""
        if self.discovered != self.publisher.epoch:
            self.ingest.freed(SLOT)
            self.ingest.joined(RANK, SLOT, self.publisher.epoch)
            self.discovered = self.publisher.epoch

    def store(self, tokens: list[int]) -> None:
        """Store what follows the longest prefix held; engine hashes are sequence hashes, one bit flipped."""
        hashes = [value ^ 1 for value in unpack_hashes(Prompt(tokens, block_size=1).sequence_hashes)]
        start = next((n for n, value in enumerate(hashes) if value not in self.held), len(hashes))
        if start < len(hashes):
            parent = EngineHash(hashes[start - 1]) if start else None
            self.publisher.publish_stored(tokens[start:], hashes[start:], parent=parent)
            self.held += hashes[start:]

    async def fall_quiet(self) -> None:
        """What was held back arrives, discovery catches up, a heartbeat comes, questions are answered."""
        self.publisher.flush()
        self.wire.is_bad = False
        self.wire.release()
        self.discover()
        self.publisher.heartbeat([DpRank(0)])
        for _ in range(60):
            await asyncio.sleep(0)


async def run(steps: list[str], seed: int) -> None:
    rig = Rig(seed)
    for name in steps:
        await rig.step(name)
    await rig.fall_quiet()
    [(_, feed)] = list(rig.ingest.feeds())
    truth = rig.publisher.recover_snapshot(RANK)
    assert truth is not None
    assert feed.state is FeedState.LIVE
    assert (feed.epoch, feed.next_event_id) == (truth.epoch, truth.next_event_id)
    assert blocks(list(rig.index.dump(SLOT))) == blocks(truth.events)
    assert +Counter(rig.held) == Counter(engine_hash for engine_hash, _ in blocks(truth.events).elements())
    rig.ingest.close()


@settings(max_examples=max(150, settings().max_examples))
@given(STEPS, st.integers(0, 2**32))
def test_router_index_converges_to_the_published_blocks_over_a_bad_wire(steps: list[str], seed: int) -> None:
    asyncio.run(run(steps, seed))
