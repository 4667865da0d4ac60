"""The native scheduler does what its plain model does: the same steps, memory and endings; and one that leaps
ends up where one that makes every step does.
"""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.core.events import KvEvent, pack_hashes
from kvrouter.core.ids import DpRank
from kvrouter.core.timing import Timing
from kvrouter.engines.mock_engine.config import EngineHashing, MockConfig
from kvrouter.engines.mock_engine.ranks import EngineRanks, rank_of
from tests.oracles.engine_rank_model import EngineRankModel, Leg, StepOutcome

MEASURED = Timing(prefill_attention=1e-3, decode_sequence=0.3, decode_kv_token=0.07, mixed_kv_token=0.011)
TIMINGS = st.sampled_from([Timing(), MEASURED])


class Stops:
    """A content that stops after some of its tokens, whose blocks are named as a salted one's."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._twin = replace(leg)

    def hash_blocks(self, known: int, n_blocks: int) -> bytes:
        self._twin.hash_blocks(n_blocks)
        return self._twin.hashes[8 * known : 8 * n_blocks]

    def stops(self, n_output: int) -> bool:
        return n_output in self._leg.stops_at


class Native:
    """One rank of the native core, in the model's words."""

    def __init__(self, config: MockConfig, *, leaps: bool) -> None:
        self.core = EngineRanks()
        self.core.add_rank(MockConfig(), DpRank(0), leaps=leaps)
        self.rank = self.core.add_rank(config, DpRank(0), leaps=leaps)
        self.handles: dict[int, int] = {}
        self.names: dict[int, int] = {}
        self.did = StepOutcome()
        self.events: list[KvEvent] = []
        self.load: tuple[int, int, int, int] | None = None

    def submit(self, now: float, leg: Leg) -> None:
        handle = self.core.submit(
            now,
            self.rank,
            block_hashes=leg.hashes,
            prompt_tokens=leg.prompt_tokens,
            max_tokens=leg.max_tokens,
            credit_tokens=leg.credit,
            may_stop=bool(leg.stops_at),
            remote_tokens=leg.remote_tokens,
            pins_kv=leg.pins_kv,
            content=Stops(leg) if leg.stops_at else None,
            salt=leg.salt,
        )
        assert rank_of(handle) == self.rank
        self.handles[leg.name], self.names[handle] = handle, leg.name

    def advance(self, now: float) -> None:
        while self.core.run(now, through=True) is not None:
            ended, wanting = self.core.take_notices()
            self.did.ended += [(self.names[row[0]], *row[1:]) for row in ended]
            self.did.wanting += [(self.names[handle], n_tokens) for handle, n_tokens in wanting]

    def look(self) -> None:
        """Take what there is."""
        for rank, events, load, chunks, seated in self.core.take_outputs(with_loads=True):
            if rank != self.rank:
                continue
            self.events += events or ()
            self.load = load or self.load
            self.did.seated += [(self.names[handle], at_s) for handle, at_s in seated]
            self.did.chunks += [(self.names[row[0]], *row[1:]) for row in chunks]


class RankMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(4, 14),
        seats=st.integers(1, 4),
        budget=st.integers(4, 24),
        chunked=st.booleans(),
        ahead=st.booleans(),
        caching=st.sampled_from([True, True, False]),
        opaque=st.booleans(),
        timing=TIMINGS,
    )
    def begin(
        self,
        blocks: int,
        seats: int,
        budget: int,
        *,
        chunked: bool,
        ahead: bool,
        caching: bool,
        opaque: bool,
        timing: Timing,
    ) -> None:
        config = MockConfig(
            block_size=4,
            total_kv_blocks=blocks,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            chunked_prefill=chunked,
            async_scheduling=ahead,
            prefix_caching=caching,
            engine_hashing=EngineHashing.OPAQUE if opaque else EngineHashing.DETERMINISTIC,
            timing=timing,
        )
        self.config = config
        self.model = EngineRankModel(config)
        self.steps, self.leaps = Native(config, leaps=False), Native(config, leaps=True)
        self.legs: dict[int, Leg] = {}
        self.pinned: set[int] = set()
        self.now_s = 0.0
        self.n_legs = 0
        self.ended: dict[int, Leg] = {}
        self.tokens: dict[int, int] = {}

    @rule(
        base=st.integers(0, 2),
        n_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 30),
        credit=st.sampled_from([1, 3, 1000, 1000]),
        stops_at=st.sampled_from([(), (), (), (2, 5)]),
        kind=st.sampled_from(["whole", "whole", "prefill", "decode", "fetching prefill"]),
        remote=st.integers(1, 30),
    )
    def submit(
        self,
        base: int,
        n_tokens: int,
        max_tokens: int,
        credit: int,
        stops_at: tuple[int, ...],
        kind: str,
        remote: int,
    ) -> None:
        pins_kv = kind.endswith("prefill")
        max_tokens = 1 if pins_kv else max_tokens
        remote_tokens = {"decode": n_tokens, "fetching prefill": min(remote, n_tokens)}.get(kind, 0)
        n_blocks = -(-(n_tokens + max_tokens - 1) // 4)
        too_long = not self.config.chunked_prefill and n_tokens > self.config.max_num_batched_tokens
        if n_blocks > self.config.total_kv_blocks or too_long:
            return
        self.n_legs += 1
        hashes = pack_hashes(base * 100 + at for at in range(n_tokens // 4))
        leg = self.legs[self.n_legs] = Leg(
            name=self.n_legs,
            hashes=hashes,
            salt=self.n_legs,
            prompt_tokens=n_tokens,
            max_tokens=max_tokens,
            credit=credit,
            stops_at=frozenset(stops_at),
            remote_tokens=remote_tokens,
            pins_kv=pins_kv,
        )
        self.model.submit(self.now_s, leg)
        for native in (self.steps, self.leaps):
            native.submit(self.now_s, leg)

    @precondition(lambda self: self.legs)
    @rule(which=st.integers(0, 99), what=st.sampled_from(["drop", "credit", "arrive", "fail"]))
    def change(self, which: int, what: str) -> None:
        leg = list(self.legs.values())[which % len(self.legs)]
        name, now_s = leg.name, self.now_s
        if what == "drop":
            del self.legs[name]
            self.model.drop(now_s, leg)
            for native in (self.steps, self.leaps):
                native.core.drop(now_s, native.handles[name])
        elif what == "credit":
            self.model.give_credit(now_s, leg, 9)
            for native in (self.steps, self.leaps):
                native.core.give_credit(now_s, native.handles[name], 9)
        elif leg.remote_tokens:
            self.model.receive(now_s, leg, arrived=what == "arrive")
            for native in (self.steps, self.leaps):
                native.core.receive(now_s, native.handles[name], what == "arrive")

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        name = sorted(self.pinned)[which % len(self.pinned)]
        self.pinned.discard(name)
        leg = self.ended[name]
        self.model.release(self.now_s, leg)
        for native in (self.steps, self.leaps):
            native.core.release(self.now_s, native.handles[name])

    @rule(for_s=st.sampled_from([0.0, 0.003, 0.02, 0.1, 1.0, -1.0]))
    def wait(self, for_s: float) -> None:
        """A negative one is up to the very end of a step."""
        next_s = self.model.next_time()
        self.now_s = (
            max(self.now_s, next_s) if for_s < 0 and next_s is not None else self.now_s + max(for_s, 0)
        )
        self.model.advance(self.now_s)
        for native in (self.steps, self.leaps):
            native.advance(self.now_s)
        self.compare()

    def compare(self) -> None:
        model = self.model.take()
        events = self.model.kv.take_events()
        self.steps.look()
        assert (self.steps.did.ended, self.steps.did.wanting) == (model.ended, model.wanting)
        assert (self.steps.did.seated, self.steps.did.chunks) == (model.seated, model.chunks)
        assert self.steps.events == list(events)
        assert self.steps.load is None or self.steps.load == self.model.load()
        self.steps.events.clear()
        self.steps.did = StepOutcome()
        self.leaps.core.catch_up(self.now_s, self.leaps.rank)
        self.leaps.look()
        assert self.leaps.did.ended == model.ended
        assert self.leaps.did.wanting == model.wanting
        assert self.leaps.did.seated == model.seated
        assert self.leaps.events == list(events)
        assert self.leaps.load is None or self.leaps.load == self.model.load()
        for sign, chunks in ((1, model.chunks), (-1, self.leaps.did.chunks)):
            for name, n_tokens, *_ in chunks:
                self.tokens[name] = self.tokens.get(name, 0) + sign * n_tokens
        # The step that ends now is still to come where it was leapt over.
        assert all(left in (0, 1) for left in self.tokens.values())
        assert all(not self.tokens[name] for name, *_ in model.ended)
        self.leaps.events.clear()
        self.leaps.did = StepOutcome()
        for name, *_ in model.ended:
            leg = self.legs.pop(name)
            self.ended[name] = leg
            if leg.pins_kv:
                self.pinned.add(name)

    @invariant()
    def books_are_right(self) -> None:
        for native in (self.steps, self.leaps):
            assert native.core.check_integrity(native.rank) == []


TestRank = RankMachine.TestCase
