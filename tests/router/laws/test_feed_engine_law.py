"""Whatever happens between an engine and a router, in the end the router's index is the engine's cache.

All that is real: the mock engine's paged cache, the worker's publisher and its ring, the wire's binary form,
questions and answers in pieces, the feed, event ingest and the native index. Only the wire is fake: it loses,
repeats, holds back and reorders what is sent, and answers late, wrongly or never; workers and routers start
again at any time. The truth is what the engine finds in its own cache, not what anybody published.
"""

import asyncio
import random
from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch, KvEvent, KvSnapshot
from kvrouter.core.ids import DpRank, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, LoadReport, WorkerCard
from kvrouter.engines.mock_engine.config import EngineHashing, MockConfig
from kvrouter.engines.mock_engine.engine import MockEngine
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.encoding import decode_batch, encode_parts
from kvrouter.transports.events.port import BatchSink, LoadSink
from kvrouter.transports.events.recovery import (
    ENVELOPE_BYTES,
    RecoveryAnswers,
    RecoveryQuestions,
)
from kvrouter.worker import KvPublisher
from tests.testing.blocks import Blocks, blocks, blocks_of_cache
from tests.testing.engine_requests import plain_leg
from tests.testing.virtual_time import run_in_virtual_time

WORKER = WorkerId(1)
RANKS = tuple(WorkerRank(WORKER, DpRank(rank)) for rank in (0, 1))
HEARTBEAT_S = 5.0
RING_EVENTS = 6
FRAME_BYTES = 200
ANSWER_FRAME_BYTES = ENVELOPE_BYTES + 64


class BadWire:
    """Both ends of an event plane between one worker and the routers that come and go."""

    def __init__(self, chance: random.Random) -> None:
        self.is_bad = True
        self.desk = RecoveryAnswers()
        self._questions = RecoveryQuestions(lambda _rank: self._ask)
        self.source = EventSource(EventTransport.MEMORY)
        self._chance = chance
        self._held_back: list[bytes] = []
        self._sinks: list[BatchSink] = []

    def publish(self, batch: KvBatch) -> None:
        for frame, _ in encode_parts(batch, max_bytes=FRAME_BYTES):
            fate = self._chance.choice(["", "", "", "lost", "twice", "held back"]) if self.is_bad else ""
            if fate == "held back":
                self._held_back.append(frame)
            for _ in range({"lost": 0, "held back": 0, "twice": 2}.get(fate, 1)):
                self._deliver(frame)

    def publish_load(self, report: LoadReport) -> None:
        """Loads are not what this is about."""

    def release(self) -> None:
        """What was held back arrives, late and in any order; some of it waits on."""
        self._chance.shuffle(self._held_back)
        n_left = self._chance.randrange(len(self._held_back) + 1) if self.is_bad else 0
        while len(self._held_back) > n_left:
            self._deliver(self._held_back.pop())

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        self._sinks.append(on_batch)
        return lambda: self._sinks.remove(on_batch)

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        return lambda: None

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return await self._questions.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:
        return await self._questions.recover_snapshot(rank)

    def _deliver(self, frame: bytes) -> None:
        for on_batch in tuple(self._sinks):
            on_batch(decode_batch(frame))

    async def _ask(self, question: bytes) -> bytes | None:
        fate = self._chance.choice([*[""] * 12, "late", "nobody", "never", "wrong"]) if self.is_bad else ""
        if fate == "nobody":
            return None
        if fate == "wrong":
            raise ProtocolError("answer: not one", param="answer")
        now_s = asyncio.get_running_loop().time()
        answer = self.desk.answer(question, frame_max_bytes=ANSWER_FRAME_BYTES, now_s=now_s)
        await asyncio.sleep({"late": self._chance.uniform(0.0, 6.0), "never": 1e6}.get(fate, 0.0))
        return answer


class Worker:
    """One start of the worker: an engine with an empty cache, and its publisher."""

    def __init__(self, wire: BadWire, epoch: Epoch, hashing: EngineHashing) -> None:
        config = MockConfig(
            block_size=4, total_kv_blocks=24, dp_size=len(RANKS), engine_hashing=hashing, seed=epoch
        )
        self.engine = MockEngine(config, worker_id=WORKER, engine_id=f"mock-{epoch}")
        self.publisher = KvPublisher(
            wire,
            worker_id=WORKER,
            epoch=epoch,
            block_size=config.block_size,
            snapshot=self.snapshot,
            held_blocks=self.held_blocks,
            ring_events_max=RING_EVENTS,
        )
        self.end_recovery = wire.desk.serve(WORKER, self.publisher)
        self._numbers: Iterator[int] = iter(range(1_000_000))

    def snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        self.tell()
        return self.engine.snapshot(dp_rank)

    def held_blocks(self, dp_rank: DpRank) -> int:
        self.tell()
        return self.engine.held_blocks(dp_rank)

    def serve(self, rank: WorkerRank, prompt: list[int], max_tokens: int, *, for_s: float) -> None:
        """Let the engine run a request for a while; some events are reported before others happen."""
        now_s = asyncio.get_running_loop().time()
        name = f"r{next(self._numbers)}"
        request = plain_leg(name, prompt, max_tokens=max_tokens, dp_rank=rank.dp_rank)
        self.engine.submit(now_s, request)
        self.engine.advance(now_s + for_s)

    def tell(self) -> None:
        for dp_rank, events in self.engine.take_outputs().events:
            self.publisher.publish(dp_rank, tuple(events))

    def die(self) -> None:
        self.publisher.close()
        self.end_recovery()

    def holds(self, rank: WorkerRank) -> Blocks:
        """What the engine's own cache holds, by a walk of its blocks."""
        return blocks_of_cache(self.engine.snapshot(rank.dp_rank))


class Router:
    """One start of a router, which learns everything again."""

    def __init__(self, wire: BadWire, epoch: Epoch) -> None:
        self.epoch = epoch
        self.index = NativeBlockIndex()
        self.ingest = EventIngest(self.index, wire, ModelInstrumentation(Telemetry(), "m"))
        self._end = wire.subscribe(self.ingest.on_batch, lambda _report: None)
        self._join()

    def discover(self, epoch: Epoch) -> None:
        """Discovery tells of the worker's present start."""
        if epoch != self.epoch:
            self.epoch = epoch
            for slot in range(len(RANKS)):
                self.ingest.freed(Slot(slot))
            self._join()

    def stop(self) -> None:
        self._end()
        self.ingest.close()

    def _join(self) -> None:
        for slot, rank in enumerate(RANKS):
            self.ingest.joined(rank, Slot(slot), self.epoch)


class Rig:
    def __init__(self, seed: int, hashing: EngineHashing) -> None:
        self.chance = random.Random(seed)
        self.hashing = hashing
        self.wire = BadWire(self.chance)
        self.epochs: Iterator[int] = iter(self.chance.sample(range(1, 1000), 50))
        self.worker = self.new_worker()
        self.published_card = self.worker.publisher.epoch
        self.router = Router(self.wire, self.published_card)

    def new_worker(self) -> Worker:
        return Worker(self.wire, Epoch(next(self.epochs)), self.hashing)

    async def step(self, name: str) -> None:
        match name:
            case "serve":
                for _ in range(self.chance.randrange(1, 5)):
                    await self.serve()
            case "turn":
                await asyncio.sleep(0)
            case "release":
                self.wire.release()
            case "time passes":
                await asyncio.sleep(self.chance.choice([0.1, 3.0, 11.0]))
            case "heartbeat":
                self.worker.publisher.heartbeat([rank.dp_rank for rank in RANKS])
            case "worker restarts":
                self.worker.die()
                self.worker = self.new_worker()
            case "card is published":
                self.published_card = self.worker.publisher.epoch
            case "discovery tells":
                self.router.discover(self.published_card)
            case "router restarts":
                self.router.stop()
                self.router = Router(self.wire, self.published_card)

    async def serve(self) -> None:
        """One request; whether its events are sent at once, and apart from the next one's, is chance."""
        chance = self.chance
        prompt = [chance.randrange(4)] * chance.randrange(1, 30) + [chance.randrange(3) for _ in range(6)]
        self.worker.serve(
            chance.choice(RANKS), prompt, chance.randrange(1, 12), for_s=chance.choice([0.05, 5.0])
        )
        if chance.random() < 0.7:
            self.worker.tell()
            await asyncio.sleep(0)

    async def fall_quiet(self) -> None:
        """The engine's requests end, the wire is good again, discovery has caught up, and heartbeats flow."""
        self.worker.engine.advance(asyncio.get_running_loop().time() + 1000.0)
        self.worker.tell()
        self.wire.is_bad = False
        self.wire.release()
        self.router.discover(self.worker.publisher.epoch)
        for _ in range(6):
            self.worker.publisher.heartbeat([rank.dp_rank for rank in RANKS])
            await asyncio.sleep(HEARTBEAT_S)


async def run(steps: list[str], seed: int, hashing: EngineHashing) -> None:
    rig = Rig(seed, hashing)
    for name in steps:
        await rig.step(name)
    await rig.fall_quiet()
    states = {feed.rank: feed.state for _, feed in rig.router.ingest.feeds()}
    assert states == dict.fromkeys(RANKS, FeedState.LIVE)
    for slot, rank in enumerate(RANKS):
        assert blocks(rig.router.index.dump(Slot(slot))) == rig.worker.holds(rank)
    rig.router.stop()


STEPS = st.lists(
    st.sampled_from(
        [
            *["serve"] * 6,
            *["turn"] * 2,
            "release",
            "time passes",
            "heartbeat",
            "worker restarts",
            "card is published",
            "discovery tells",
            "router restarts",
        ]
    ),
    min_size=8,
    max_size=50,
)


@settings(max_examples=max(150, settings().max_examples))
@given(STEPS, st.integers(0, 2**32), st.sampled_from(EngineHashing))
def test_router_index_converges_to_the_engines_cache(
    steps: list[str], seed: int, hashing: EngineHashing
) -> None:
    run_in_virtual_time(run(steps, seed, hashing))
