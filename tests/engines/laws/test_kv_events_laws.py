"""Laws of the engines' KV events: routers hold what the engine holds, or less; all of it if none is lost."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.events import Held, Medium, unpack_hashes
from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.core.ids import DpRank, EngineHash, Slot
from kvrouter.engines.kv_events.batches import REPLAY_END
from kvrouter.engines.kv_events.engine_events import (
    CacheGroup,
    EngineCleared,
    EngineEvent,
    EngineMoved,
    EngineRemoved,
    EngineTraits,
)
from kvrouter.engines.kv_events.event_stream import AskReplay, Command, EngineEventStream, Publish
from kvrouter.engines.kv_events.rank_blocks import RankBlocks
from kvrouter.engines.vllm.events import decode
from kvrouter.worker.kv_publisher import RankMirror
from tests.oracles.index import NaiveBlockIndex
from tests.testing.recorded_frames import stored

BLOCK_SIZE = 4
SLOT = Slot(0)
R0 = DpRank(0)

NAMES = st.integers(1, 9)
MEDIA = st.sampled_from((Medium.GPU, Medium.CPU))


@st.composite
def engine_events(draw: st.DrawFn) -> EngineEvent:
    """Any event, also ones that no sane engine sends: names stand for any content, parents for any block."""
    match draw(st.integers(0, 5)):
        case 0 | 1 | 2:
            names = draw(st.lists(NAMES, min_size=1, max_size=3))
            tokens = draw(st.none() | st.lists(st.integers(0, 1), min_size=0, max_size=12))
            return stored(
                names,
                parent=draw(st.none() | NAMES),
                tokens=tokens,
                medium=draw(MEDIA),
                cache_salt=draw(st.sampled_from((None, "a"))),
                group=draw(st.sampled_from((None, CacheGroup(0, 2), CacheGroup(1, 0)))),
            )
        case 3:
            gone = tuple(map(EngineHash, draw(st.lists(NAMES, max_size=3))))
            return EngineRemoved(gone, draw(st.none() | MEDIA), draw(st.sampled_from((None, 0, 1))))
        case 4:
            return EngineMoved(EngineHash(draw(NAMES)), draw(MEDIA), draw(MEDIA))
        case _:
            return EngineCleared()


@given(events=st.lists(engine_events(), max_size=40), blocks_max=st.integers(1, 12))
def test_ledger_index_and_mirror_hold_the_same_blocks(events: list[EngineEvent], blocks_max: int) -> None:
    """So a parent a worker knows is known to every router, and none meets a store that it can't place."""
    ledger = RankBlocks(EngineTraits(block_size=BLOCK_SIZE, blocks_max=blocks_max))
    index, mirror = NaiveBlockIndex(), RankMirror()
    for event in events:
        reported = ledger.take((event,))
        applied = index.apply(SLOT, reported)
        mirror.apply(reported)
        assert (applied.orphaned, applied.unknown_removed) == (0, 0)
    for medium in Medium:
        assert ledger.held(medium) == index.held(SLOT, medium)
    assert _counted(mirror.held()) == _counted(index.dump(SLOT))


Path = tuple[int, ...]
"""A block by what leads to it: a number stands for a block's tokens, and the first one for the salt too."""

OPS = st.sampled_from(
    ["store"] * 3 + ["lose"] * 2 + ["remove", "clear", "restart", "deliver", "answer", "fail", "reconnect"]
)


class Engine:
    """A cache that publishes what it does, as vLLM would; ``truth`` counts what it holds."""

    def __init__(self, start: int, ring_batches_max: int) -> None:
        self.start = start
        self.truth: Counter[Path] = Counter()
        self.payloads: list[bytes] = []
        self._ring_batches_max = ring_batches_max

    def store(self, path: Path) -> None:
        """Store the blocks of ``path`` that are not held, and its last one in any case."""
        known = max((n for n in range(len(path)) if n and path[:n] in self.truth), default=0)
        new = [path[:n] for n in range(known + 1, len(path) + 1)]
        self.truth.update(new)
        self._publish(
            {
                "type": "BlockStored",
                "block_hashes": [_name(each) for each in new],
                "parent_block_hash": _name(path[:known]) if known else None,
                "token_ids": [token for each in new for token in [each[-1]] * BLOCK_SIZE],
                "block_size": BLOCK_SIZE,
                "extra_keys": [[f"salt{each[0]}"] if len(each) == 1 else None for each in new],
            }
        )

    def remove(self, path: Path) -> None:
        """Take back one store."""
        self.truth[path] -= 1
        self.truth = +self.truth
        self._publish({"type": "BlockRemoved", "block_hashes": [_name(path)]})

    def clear(self) -> None:
        """Forget everything."""
        self.truth.clear()
        self._publish({"type": "AllBlocksCleared"})

    def frames(self, seq: int) -> tuple[bytes, bytes, bytes]:
        """A batch as it is published."""
        return b"", seq.to_bytes(8, "big"), self.payloads[seq]

    def replay(self, start_seq: int) -> list[tuple[bytes, ...]]:
        """What is answered to a question."""
        first = max(start_seq, len(self.payloads) - self._ring_batches_max)
        batches = [(b"", *self.frames(seq)) for seq in range(first, len(self.payloads))]
        return [*batches, (b"", b"", REPLAY_END, b"")]

    def _publish(self, event: dict[str, object]) -> None:
        # No two batches are alike, as their times are not.
        time_s = float(self.start * 1_000_000 + len(self.payloads))
        self.payloads.append(msgspec.msgpack.encode([time_s, [event], 0]))


class Wire:
    """An engine, a worker's event stream, and an index behind them; before the stream, batches are lost."""

    def __init__(self, *, ring_batches_max: int, can_replay: bool, before: int) -> None:
        self._ring_batches_max = ring_batches_max
        self._can_replay = can_replay
        self.engine = Engine(1, ring_batches_max)
        for i in range(before):
            self.engine.store((i % 3, 1))
        self.sent = before
        self.questions: list[int] = []
        self.index = NaiveBlockIndex()
        self.follower = EngineEventStream(decode, EngineTraits(block_size=BLOCK_SIZE), can_replay=can_replay)
        self._carry_out(self.follower.start())

    def restart(self) -> None:
        """The engine dies, with what was on its way, and is back."""
        self.engine = Engine(self.engine.start + 1, self._ring_batches_max)
        self.sent = 0
        self.reconnect()

    def reconnect(self) -> None:
        self._carry_out(self.follower.on_reconnected())

    def lose(self) -> None:
        """The next batch is never seen."""
        self.sent = min(self.sent + 1, len(self.engine.payloads))

    def deliver(self) -> None:
        """All that is on its way arrives."""
        while self.sent < len(self.engine.payloads):
            self._carry_out(self.follower.on_published(self.engine.frames(self.sent)))
            self.sent += 1

    def answer(self) -> None:
        """One question is answered."""
        if self.questions:
            for frames in self.engine.replay(self.questions.pop(0)):
                self._carry_out(self.follower.on_replayed(frames))

    def fail(self) -> None:
        """One question is never answered."""
        if self.questions:
            self.questions.pop(0)
            self._carry_out(self.follower.on_replay_failed())

    def settle(self) -> None:
        """The wire is good from here on; one more store shows whether something is missing."""
        self.engine.store((9, 9))
        self.deliver()
        while self.questions:
            self.answer()

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, AskReplay):
                self.questions.append(command.start_seq)
            elif isinstance(command, Publish):
                assert command.dp_rank == R0
                applied = self.index.apply(SLOT, command.events)
                assert (applied.orphaned, applied.unknown_removed) == (0, 0)


@settings(max_examples=200)
@given(
    ops=st.lists(st.tuples(OPS, st.integers(0, 5)), max_size=40),
    ring_batches_max=st.sampled_from((1, 3, 100)),
    can_replay=st.booleans(),
    before=st.integers(0, 5),
)
def test_router_index_is_part_of_the_engine_cache_and_equal_if_no_loss(
    ops: list[tuple[str, int]], ring_batches_max: int, can_replay: bool, before: int
) -> None:
    wire = Wire(ring_batches_max=ring_batches_max, can_replay=can_replay, before=before)
    for op, choice in ops:
        _do(wire, op, choice)
    wire.settle()
    assert not wire.follower.is_waiting
    held = _counted(wire.index.dump(SLOT))
    truth = Counter({(_name(path), _sequence(path)): n for path, n in wire.engine.truth.items()})
    assert held <= truth
    if not wire.follower.partial_ranks:
        assert held == truth


def _do(wire: Wire, op: str, choice: int) -> None:
    engine = wire.engine
    match op:
        case "store":
            engine.store(((0,), (0, 1), (0, 1, 2), (1,), (1, 1), (2, 1, 3, 4))[choice])
        case "remove" if engine.truth:
            engine.remove(sorted(engine.truth)[choice % len(engine.truth)])
        case "clear" if choice == 0:
            engine.clear()
        case "restart" if choice == 0:
            wire.restart()
        case "lose" | "deliver" | "answer" | "fail" | "reconnect":
            getattr(wire, op)()


def _name(path: Path) -> int:
    return int.from_bytes(bytes((7, *path)), "big")


def _sequence(path: Path) -> int:
    tokens = [token for number in path for token in [number] * BLOCK_SIZE]
    seed = hash_seed(cache_namespace=f"salt{path[0]}")
    return unpack_hashes(Prompt(tokens, block_size=BLOCK_SIZE, seed=seed).sequence_hashes)[-1]


def _counted(snapshot: Sequence[Held]) -> Counter[tuple[int, int]]:
    """How often each (engine hash, sequence hash) is held, over all media."""
    return Counter(
        pair
        for event in snapshot
        for pair in zip(unpack_hashes(event.engine_hashes), unpack_hashes(event.sequence_hashes), strict=True)
    )
