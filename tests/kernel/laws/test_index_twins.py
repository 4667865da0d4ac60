"""The native block index equals its naive twin after any events of any ranks."""

from collections.abc import Sequence
from dataclasses import asdict

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvrouter.core.events import Cleared, Held, KvEvent, KvEvents, Medium, Removed, Stored, pack_hashes
from kvrouter.core.hashing import Prompt, block_hashes
from kvrouter.core.ids import EngineHash, Slot
from kvrouter.kernel.index import Applied, NativeBlockIndex
from tests.oracles.index import NaiveApplied, NaiveBlockIndex

TOKENS = st.integers(0, 2)
NAMES = st.integers(0, 8) | st.just(2**64 - 1)
SLOTS = st.sampled_from([Slot(n) for n in (0, 3, 64, 130)])
MEDIA = st.sampled_from([Medium.GPU, Medium.GPU, Medium.CPU, Medium.EXTERNAL])
N_SLOTS = 131

PROMPTS = [
    Prompt(tokens, block_size=1)
    for tokens in [[], [0] * 6, [0, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2], [1, 0, 0], [2, 2, 2, 2], [1, 1, 1]]
]


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    """A run of blocks, under a parent that may or may not be known, by names that may be taken."""
    names = draw(st.lists(NAMES, min_size=0, max_size=6))
    tokens = draw(st.lists(TOKENS, min_size=len(names), max_size=len(names)))
    parent = draw(st.none() | NAMES)
    return Stored(
        None if parent is None else EngineHash(parent),
        pack_hashes(names),
        block_hashes(tokens, block_size=1),
        draw(MEDIA),
    )


@st.composite
def helds(draw: st.DrawFn) -> Held:
    """Part of a snapshot."""
    of = draw(st.sampled_from(PROMPTS))
    names = draw(st.lists(NAMES, min_size=of.n_blocks, max_size=of.n_blocks))
    return Held(pack_hashes(names), of.sequence_hashes, draw(MEDIA))


REMOVALS = st.builds(Removed, st.lists(NAMES, max_size=5).map(pack_hashes), MEDIA)
EVENTS: st.SearchStrategy[KvEvent] = st.one_of(stores(), stores(), stores(), REMOVALS, st.just(Cleared()))


def same(ours: Applied, twin: NaiveApplied) -> None:
    assert {name: getattr(ours, name) for name in asdict(twin)} == asdict(twin)


class Twins(RuleBasedStateMachine):
    """Both indexes, fed alike."""

    placed: Bundle[tuple[Slot, Stored]] = Bundle("placed")

    def __init__(self) -> None:
        super().__init__()
        self.native = NativeBlockIndex(blocks_per_rank_max=12)
        self.naive = NaiveBlockIndex(blocks_per_rank_max=12)
        self.kept: list[Held] = []

    @rule(slot=SLOTS, events=st.lists(EVENTS, max_size=4), is_frame=st.booleans())
    def apply(self, slot: Slot, events: Sequence[KvEvent], is_frame: bool) -> None:
        read = KvEvents.decode(msgspec.msgpack.encode(events)) if is_frame else events
        assert read is not None
        same(self.native.apply(slot, read), self.naive.apply(slot, events))

    @rule(target=placed, slot=SLOTS, event=stores(), times=st.integers(1, 3))
    def store(self, slot: Slot, event: Stored, times: int) -> tuple[Slot, Stored]:
        same(self.native.apply(slot, [event] * times), self.naive.apply(slot, [event] * times))
        return slot, event

    @rule(stored=placed, skip=st.integers(0, 5), times=st.integers(1, 2))
    def remove(self, stored: tuple[Slot, Stored], skip: int, times: int) -> None:
        slot, event = stored
        events = [Removed(event.engine_hashes[8 * skip :], event.medium)] * times
        same(self.native.apply(slot, events), self.naive.apply(slot, events))

    @rule(
        slots=st.lists(SLOTS, min_size=2, unique=True), of=st.sampled_from(PROMPTS), first=st.integers(0, 9)
    )
    def store_everywhere(self, slots: list[Slot], of: Prompt, first: int) -> None:
        event = Stored(None, pack_hashes(range(first, first + of.n_blocks)), of.block_hashes)
        for slot in slots:
            same(self.native.apply(slot, [event]), self.naive.apply(slot, [event]))

    @rule(slot=SLOTS)
    def drop(self, slot: Slot) -> None:
        assert self.dropped(self.native, slot) == self.dropped(self.naive, slot)

    @staticmethod
    def dropped(index: NativeBlockIndex | NaiveBlockIndex, slot: Slot) -> int:
        n_blocks = 0
        while dropped := index.drop_some(slot).cleared:
            n_blocks += dropped
        return n_blocks

    @rule(slot=SLOTS)
    def dump(self, slot: Slot) -> None:
        self.kept = self.native.dump(slot)
        assert self.kept == self.naive.dump(slot)
        parts, place = [], 0
        while (some := self.native.dump_some(slot, place)) is not None:
            parts += some[0]
            place = some[1]
        again = NaiveBlockIndex()
        again.apply(slot, parts)
        assert again.dump(slot) == self.kept

    @rule(slot=SLOTS)
    def load(self, slot: Slot) -> None:
        self.load_anything(slot, self.kept)

    @rule(slot=SLOTS, held=st.lists(helds(), max_size=3))
    def load_anything(self, slot: Slot, held: list[Held]) -> None:
        same(self.native.apply(slot, [Cleared(), *held]), self.naive.apply(slot, [Cleared(), *held]))

    @invariant()
    def overlaps_are_equal(self) -> None:
        ours, twin = np.full(N_SLOTS, 77, np.uint32), np.full(N_SLOTS, 99, np.uint32)
        for medium in (Medium.GPU, Medium.CPU, Medium.EXTERNAL):
            for prompt in PROMPTS:
                self.native.overlap(prompt, ours, medium)
                self.naive.overlap(prompt, twin, medium)
                assert ours.tolist() == twin.tolist()

    @invariant()
    def sizes_are_equal(self) -> None:
        ours, twin = self.native.stats(), self.naive.stats()
        assert (ours.blocks, ours.sequences, ours.ranks) == (twin.blocks, twin.sequences, twin.ranks)
        assert (ours.bytes == 0) == (ours.ranks == 0)


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=80, stateful_step_count=40)
