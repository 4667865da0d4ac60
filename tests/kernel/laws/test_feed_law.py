"""Whatever happens to a rank's batches, a scoring feed holds no block that was gone, and a quiet wire ends in
the truth.
"""

from collections import Counter, deque
from enum import Enum, auto
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrouter.core.events import (
    Cleared,
    Held,
    KvBatch,
    KvEvent,
    KvSnapshot,
    Removed,
    Stored,
    pack_hashes,
    unpack_hashes,
)
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import (
    Apply,
    AskRange,
    AskSnapshot,
    Command,
    Empty,
    FeedLimits,
    FeedState,
    Load,
)

RANK = WorkerRank(WorkerId(1), DpRank(0))
LIMITS = FeedLimits(inbox_events_max=6, range_events_max=4, epochs_max=3)
RING_EVENTS = 5
BLOCKS = st.integers(1, 6)
INDEXES = st.integers(0, 50)


class Fate(Enum):
    """What becomes of what a rank publishes."""

    ARRIVES = auto()
    ARRIVES_TWICE = auto()
    WAITS = auto()
    IS_LOST = auto()
    UNPUBLISHED = auto()


FATES = st.sampled_from(Fate)
Ask = AskRange | AskSnapshot
Answer = tuple[Ask, KvBatch | KvSnapshot | None]


class Publisher:
    """The worker's side, and the truth: what the rank held before each event id of each epoch."""

    def __init__(self, epochs: "count[int]") -> None:
        self.truth: dict[tuple[Epoch, EventId], Counter[int]] = {}
        self._epochs = epochs
        self.restart()

    def restart(self) -> None:
        self.epoch = Epoch(next(self._epochs))
        self.blocks: Counter[int] = Counter()
        self.next_id = EventId(0)
        self.pending: list[KvEvent] = []
        self.ring: deque[KvEvent] = deque(maxlen=RING_EVENTS)
        self.truth[self.epoch, self.next_id] = Counter()

    def add(self, event: KvEvent) -> None:
        change(self.blocks, event)
        self.pending.append(event)
        self.ring.append(event)
        self.next_id = EventId(self.next_id + 1)
        self.truth[self.epoch, self.next_id] = Counter(self.blocks)

    def flush(self) -> KvBatch:
        """The pending events as a batch; an empty one when there are none."""
        events, self.pending = tuple(self.pending), []
        return KvBatch(RANK, self.epoch, EventId(self.next_id - len(events)), events)

    def answer(self, ask: Ask) -> KvBatch | KvSnapshot | None:
        if isinstance(ask, AskSnapshot):
            hashes = pack_hashes(sorted(self.blocks.elements()))
            return KvSnapshot(RANK, self.epoch, self.next_id, (Held(hashes, hashes),))
        ring_first = self.next_id - len(self.ring)
        if ask.first < ring_first or ask.last >= self.next_id:
            return None
        events = tuple(self.ring)[ask.first - ring_first : ask.last + 1 - ring_first]
        return KvBatch(RANK, self.epoch, ask.first, events)


def change(blocks: Counter[int], event: KvEvent) -> bool:
    """Do to ``blocks`` what an index does; False when the parent of a store is not known."""
    match event:
        case Stored():
            if event.parent is not None and not blocks[event.parent]:
                return False
            blocks.update(unpack_hashes(event.engine_hashes))
        case Removed():
            for block in unpack_hashes(event.engine_hashes):
                blocks[block] = max(0, blocks[block] - 1)
        case Cleared():
            blocks.clear()
    return True


class FeedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.publisher = Publisher(count(100))
        self.wire: list[KvBatch] = []
        self.now_s = 0.0
        self.new_router()

    def new_router(self) -> None:
        self.feed = RankFeed(RANK, limits=LIMITS)
        self.index: Counter[int] = Counter()
        self.asks: list[Ask] = []
        self.answers: list[Answer] = []

    def do(self, commands: list[Command]) -> None:
        has_orphans = is_short = False
        for command in commands:
            match command:
                case Apply():
                    for event in command.events:
                        is_orphan = not change(self.index, event)
                        has_orphans |= is_orphan
                        is_short = (is_short or is_orphan) and not isinstance(event, Cleared)
                case Load():
                    self.index = Counter()
                    for held in command.snapshot.events:
                        self.index.update(unpack_hashes(held.engine_hashes))
                case Empty():
                    self.index.clear()
                case AskRange() | AskSnapshot():
                    self.asks.append(command)
        if has_orphans:
            assert not (is_short and self.feed.state is FeedState.LIVE), "a complete history has no orphans"
            self.do(self.feed.on_orphan(now_s=self.now_s))

    def deliver_batch(self, batch: KvBatch) -> None:
        self.do(self.feed.on_batch(batch, now_s=self.now_s))

    def deliver_answer(self, ask: Ask, answer: KvBatch | KvSnapshot | None) -> None:
        if isinstance(ask, AskRange):
            assert answer is None or isinstance(answer, KvBatch)
            self.do(self.feed.on_range(ask.ticket, answer, now_s=self.now_s))
        else:
            assert answer is None or isinstance(answer, KvSnapshot)
            self.do(self.feed.on_snapshot(ask.ticket, answer, now_s=self.now_s))

    # The engine, and the wire that its events take: most arrive, some are lost or wait.

    def publish(self, fate: Fate) -> None:
        if fate is Fate.UNPUBLISHED:
            return
        batch = self.publisher.flush()
        match fate:
            case Fate.ARRIVES:
                self.deliver_batch(batch)
            case Fate.ARRIVES_TWICE:
                self.deliver_batch(batch)
                self.wire.append(batch)
            case Fate.WAITS:
                self.wire.append(batch)

    @rule(block=BLOCKS, n=st.integers(1, 3), is_child=st.booleans(), fate=FATES)
    def store(self, block: int, n: int, is_child: bool, fate: Fate) -> None:
        held = sorted(+self.publisher.blocks)
        parent = EngineHash(held[block % len(held)]) if is_child and held else None
        blocks = pack_hashes(range(block, block + n))
        self.publisher.add(Stored(parent, blocks, blocks))
        self.publish(fate)

    @precondition(lambda self: +self.publisher.blocks)
    @rule(which=INDEXES, fate=FATES)
    def remove(self, which: int, fate: Fate) -> None:
        held = sorted(+self.publisher.blocks)
        self.publisher.add(Removed(pack_hashes([held[which % len(held)]])))
        self.publish(fate)

    @rule(fate=FATES)
    def clear(self, fate: Fate) -> None:
        self.publisher.add(Cleared())
        self.publish(fate)

    @rule(fate=FATES)
    def heartbeat(self, fate: Fate) -> None:
        self.publish(fate)

    @precondition(lambda self: self.publisher.next_id > 0)
    @rule()
    def restart_worker(self) -> None:
        self.publisher.restart()

    @precondition(lambda self: self.wire)
    @rule(which=INDEXES)
    def deliver_what_waited(self, which: int) -> None:
        self.deliver_batch(self.wire.pop(which % len(self.wire)))

    @precondition(lambda self: self.asks)
    @rule(is_answered=st.booleans())
    def answer_at_once(self, is_answered: bool) -> None:
        ask = self.asks.pop()
        self.deliver_answer(ask, self.publisher.answer(ask) if is_answered else None)

    @precondition(lambda self: self.asks)
    @rule(is_answered=st.booleans())
    def answer(self, is_answered: bool) -> None:
        ask = self.asks.pop()
        self.answers.append((ask, self.publisher.answer(ask) if is_answered else None))

    @precondition(lambda self: self.answers)
    @rule(which=INDEXES)
    def deliver_an_answer(self, which: int) -> None:
        self.deliver_answer(*self.answers.pop(which % len(self.answers)))

    # The router.

    @precondition(lambda self: self.feed.epoch is not None)
    @rule()
    def restart_router(self) -> None:
        self.new_router()

    @precondition(lambda self: self.feed.epoch != self.publisher.epoch)
    @rule()
    def discover(self) -> None:
        self.do(self.feed.on_new_epoch(self.publisher.epoch, now_s=self.now_s))

    @precondition(lambda self: self.asks)
    @rule(which=INDEXES)
    def a_question_goes_out(self, which: int) -> None:
        self.feed.on_asked(self.asks[which % len(self.asks)].ticket, now_s=self.now_s)

    @precondition(lambda self: self.feed.next_timeout_s is not None)
    @rule(passed_s=st.sampled_from([1.0, 6.0, 11.0, 61.0]))
    def pass_time(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.do(self.feed.on_timeout(now_s=self.now_s))

    @precondition(lambda self: self.feed.scores)
    @rule()
    def report_orphan(self) -> None:
        self.do(self.feed.on_orphan(now_s=self.now_s))

    # The laws.

    @invariant()
    def a_scoring_feed_holds_nothing_that_is_gone(self) -> None:
        if not self.feed.scores:
            return
        assert self.feed.epoch is not None
        truth = self.publisher.truth[self.feed.epoch, self.feed.next_event_id]
        assert self.index <= truth, "more than the rank held at this event"
        if self.feed.state is FeedState.LIVE:
            assert +self.index == +truth, "live means exact"

    def teardown(self) -> None:
        """The wire falls quiet: what is under way arrives, asks are answered, an empty batch gets through."""
        self.publisher.pending.clear()
        self.deliver_batch(self.publisher.flush())
        for batch in reversed(self.wire):
            self.deliver_batch(batch)
        for ask, answer in self.answers:
            self.deliver_answer(ask, answer)
        for _ in range(30):
            while self.asks:
                ask = self.asks.pop(0)
                self.deliver_answer(ask, self.publisher.answer(ask))
            if self.feed.state is FeedState.LIVE:
                break
            self.now_s = max(self.now_s, self.feed.next_timeout_s or self.now_s)
            self.do(self.feed.on_timeout(now_s=self.now_s))
        assert self.feed.state is FeedState.LIVE
        assert (self.feed.epoch, self.feed.next_event_id) == (self.publisher.epoch, self.publisher.next_id)
        assert +self.index == +self.publisher.blocks


TestFeedLaw = FeedMachine.TestCase
TestFeedLaw.settings = settings(max_examples=max(300, settings().max_examples), stateful_step_count=40)
