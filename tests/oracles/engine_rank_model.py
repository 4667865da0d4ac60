"""A plain model of one rank of :class:`kvrouter.engines.mock_engine.ranks.EngineRanks`: it makes every step.
What it does, the native one has to do.
"""

from collections import deque
from dataclasses import dataclass, field

from kvrouter.core.events import HashColumn, pack_hashes
from kvrouter.core.hashing import finish64
from kvrouter.engines.mock_engine.config import EngineHashing, MockConfig
from kvrouter.engines.mock_engine.tokens import MASK
from tests.oracles.paged_kv_model import PagedKvModel

STEP = 0xD1342543DE82EF95

Work = list[tuple["Leg", int]]


@dataclass(eq=False)
class Leg:
    """One sequence. Its output stops with the tokens whose numbers are in ``stops_at``."""

    name: int
    hashes: HashColumn
    salt: int
    prompt_tokens: int
    max_tokens: int
    credit: int
    stops_at: frozenset[int]
    remote_tokens: int
    pins_kv: bool
    n_tokens: int = 0
    state: str = "waiting"
    prefilling: bool = True
    table: int | None = None
    room: int = 0
    computed: int = 0
    planned: int = 0
    planned_outputs: int = 0
    outputs: int = 0
    cached: int | None = None
    is_cached_reported: bool = False
    first_s: float | None = None
    pending: int = 0
    finish: int = 0

    def __post_init__(self) -> None:
        self.n_tokens = self.prompt_tokens

    def hash_blocks(self, n_blocks: int) -> None:
        known = len(self.hashes) // 8
        self.hashes += pack_hashes(finish64((self.salt + at * STEP) & MASK) for at in range(known, n_blocks))


@dataclass
class StepOutcome:
    """What a rank did since the last look."""

    ended: list[tuple[int, float, float, int, int]] = field(default_factory=list)
    wanting: list[tuple[int, int]] = field(default_factory=list)
    seated: list[tuple[int, float]] = field(default_factory=list)
    chunks: list[tuple[int, int, int | None, int]] = field(default_factory=list)


class EngineRankModel:
    """Rank 0 of an engine."""

    def __init__(self, config: MockConfig) -> None:
        self.config = config
        self.kv = PagedKvModel(
            total_blocks=config.total_kv_blocks,
            opaque=config.engine_hashing is EngineHashing.OPAQUE,
            seed=(config.seed << 16) & MASK,
            caching=config.prefix_caching,
        )
        self.waiting: deque[Leg] = deque()
        self.ready: deque[Leg] = deque()
        self.running: list[Leg] = []
        self.receiving: list[Leg] = []
        self.parked: list[Leg] = []
        self.dirty: list[Leg] = []
        self.did = StepOutcome()
        self.step: tuple[float, Work] | None = None
        self.executing: Work = []
        self.planned: Work = []
        self.now_s = 0.0
        self.wake_at_s: float | None = None

    def submit(self, now: float, leg: Leg) -> None:
        self.waiting.append(leg)
        self.wake(now)

    def drop(self, now: float, leg: Leg) -> None:
        for place in (self.waiting, self.ready, self.running, self.receiving, self.parked):
            if leg in place:
                place.remove(leg)
        leg.state, leg.finish = "ended", 3
        self.free(leg)
        self.report(leg)
        self.wake(now)

    def release(self, now: float, leg: Leg) -> None:
        self.free(leg)
        self.wake(now)

    def give_credit(self, now: float, leg: Leg, tokens: int) -> None:
        was_out = leg.credit <= 0
        leg.credit += tokens
        if was_out and leg.credit > 0:
            if leg in self.parked:
                self.parked.remove(leg)
                leg.state = "waiting"
                self.waiting.appendleft(leg)
            self.wake(now)

    def receive(self, now: float, leg: Leg, *, arrived: bool) -> None:
        if leg in self.receiving:
            if arrived:
                leg.computed = max(leg.computed, min(leg.remote_tokens, leg.n_tokens - 1))
                leg.prefilling = leg.remote_tokens < leg.n_tokens
                self.commit(leg, max(leg.computed, leg.remote_tokens))
            self.receiving.remove(leg)
            leg.state = "ready"
            self.ready.append(leg)
        leg.remote_tokens = 0
        self.wake(now)

    def next_time(self) -> float | None:
        return self.step[0] if self.step is not None else self.wake_at_s

    def advance(self, now: float) -> None:
        """Do everything that is due up to ``now``."""
        while (time := self.next_time()) is not None and time <= now:
            self.now_s = time
            if self.step is not None:
                work, self.step = self.step[1], None
                if self.config.async_scheduling:
                    for leg, n_tokens in work:
                        leg.planned_outputs -= leg.computed + n_tokens == leg.n_tokens
                        leg.planned -= n_tokens
                self.compute(work)
                self.wake_at_s = time
            self.wake_at_s = None
            self.begin(time)

    def load(self) -> tuple[int, int, int, int]:
        """Active blocks, tokens to prefill, running and waiting requests."""
        waiting = [leg for leg in self.waiting if not leg.remote_tokens]
        prefilling = [leg for leg in (*self.running, *self.ready, *waiting) if leg.prefilling]
        others = (self.waiting, self.ready, self.receiving, self.parked)
        return (
            self.kv.total_blocks - self.kv.free_blocks - self.kv.idle_blocks,
            sum(leg.n_tokens - leg.computed for leg in prefilling),
            len(self.running),
            sum(map(len, others)),
        )

    def take(self) -> StepOutcome:
        """What happened since the last call."""
        did, self.did = self.did, StepOutcome()
        for leg in self.dirty:
            is_new = leg.cached is not None and not leg.is_cached_reported
            leg.is_cached_reported |= is_new
            did.chunks.append((leg.name, leg.pending, leg.cached if is_new else None, leg.finish))
            leg.pending = 0
        self.dirty.clear()
        return did

    def wake(self, now: float) -> None:
        if self.wake_at_s is None:
            self.wake_at_s = now

    def free(self, leg: Leg) -> None:
        table, leg.table = leg.table, None
        if table is not None:
            self.kv.release(table)

    def report(self, leg: Leg) -> None:
        if leg not in self.dirty:
            self.dirty.append(leg)

    def begin(self, now: float) -> None:
        work = self.plan_ahead() if self.config.async_scheduling else self.plan()
        if not work:
            return
        timing = self.config.timing
        prefill_tokens = attended = n_decoding = kv_tokens = 0
        for leg, n_tokens in work:
            if leg.prefilling:
                prefill_tokens += n_tokens
                attended += n_tokens * leg.computed + n_tokens * (n_tokens + 1) // 2
            else:
                n_decoding += 1
                kv_tokens += leg.computed
        step_ms = timing.prefill_ms(prefill_tokens, attended)
        if n_decoding:
            if prefill_tokens:
                step_ms += timing.mixed_ms(kv_tokens)
            active_blocks = self.load()[0]
            step_ms += timing.decode_ms(active_blocks / self.kv.total_blocks, n_decoding, kv_tokens)
        self.step = (now + step_ms / 1_000.0, work)

    def plan(self) -> Work:
        work: Work = []
        budget, preempted = self.continue_running(work)
        if not preempted or not (work or self.executing):
            self.admit(work, budget)
        return work

    def plan_ahead(self) -> Work:
        while True:
            self.executing = [(leg, n_tokens) for leg, n_tokens in self.planned if leg.state == "running"]
            self.planned = []
            if not self.executing:
                self.executing = self.plan()
                if not self.executing:
                    return []
                self.count_planned(self.executing)
            self.planned = self.plan()
            self.count_planned(self.planned)
            if self.executing:
                return self.executing

    def count_planned(self, work: Work) -> None:
        for leg, n_tokens in work:
            leg.planned += n_tokens
            leg.planned_outputs += leg.computed + leg.planned == leg.n_tokens + leg.planned_outputs

    def continue_running(self, work: Work) -> tuple[int, bool]:
        budget, preempted, block_size = self.config.max_num_batched_tokens, False, self.config.block_size
        for leg in tuple(self.running):
            if not budget or len(work) == self.config.max_num_seqs:
                break
            if leg.state != "running" or leg.credit <= leg.planned_outputs or leg.table is None:
                continue
            if leg.outputs + leg.planned_outputs == leg.max_tokens:
                continue
            begun = leg.computed + leg.planned
            n_tokens = min(leg.n_tokens + leg.planned_outputs - begun, budget)
            if begun + n_tokens > leg.room:
                lacking = -(-(begun + n_tokens - leg.room) // block_size)
                if not self.kv.can_grow(lacking):
                    preempted = True
                    if not self.make_room(leg, lacking):
                        continue
                leg.room = self.kv.grow(leg.table, lacking) * block_size
            work.append((leg, n_tokens))
            budget -= n_tokens
        return budget, preempted

    def make_room(self, needy: Leg, n_blocks: int) -> bool:
        while not self.kv.can_grow(n_blocks):
            victim = self.paused() or self.running[-1]
            if victim is needy and needy.planned:
                return False
            self.preempt(victim)
            if victim is needy:
                return False
        return True

    def paused(self) -> Leg | None:
        return next((leg for leg in reversed(self.running) if leg.credit <= 0), None)

    def preempt(self, leg: Leg) -> None:
        self.running.remove(leg)
        self.free(leg)
        leg.computed = leg.planned = leg.planned_outputs = 0
        leg.prefilling = True
        self.executing[:] = [entry for entry in self.executing if entry[0] is not leg]
        if leg.credit <= 0:
            leg.state = "parked"
            self.parked.append(leg)
        else:
            leg.state = "waiting"
            self.waiting.appendleft(leg)

    def admit(self, work: Work, budget: int) -> None:
        seats = self.config.max_num_seqs - sum(leg.credit > 0 for leg in self.running)
        while self.ready and seats > 0:
            leg = self.ready[0]
            n_tokens = self.share(leg.n_tokens - leg.computed, budget, alone=not work)
            if not n_tokens:
                return
            self.seat(self.ready.popleft(), n_tokens, work)
            budget -= n_tokens
            seats -= 1
        while self.waiting:
            leg = self.waiting[0]
            reusable = leg.n_tokens if leg.remote_tokens >= leg.n_tokens else leg.n_tokens - 1
            n_matched = self.kv.matched(leg.hashes, reusable // self.config.block_size)
            n_tokens = 0
            if not leg.remote_tokens:
                new_tokens = leg.n_tokens - n_matched * self.config.block_size
                n_tokens = self.share(new_tokens, budget, alone=not work) if seats > 0 else 0
                if not n_tokens:
                    return
            if not self.hold(leg, n_matched):
                return
            self.waiting.popleft()
            if leg.remote_tokens:
                leg.state = "receiving"
                self.receiving.append(leg)
                self.did.wanting.append((leg.name, max(0, leg.remote_tokens - (leg.cached or 0))))
            else:
                self.seat(leg, n_tokens, work)
                budget -= n_tokens
                seats -= 1

    def share(self, new_tokens: int, budget: int, *, alone: bool) -> int:
        if self.config.chunked_prefill or new_tokens <= budget:
            return max(0, min(new_tokens, budget))
        return new_tokens if alone else 0

    def hold(self, leg: Leg, n_matched: int) -> bool:
        n_blocks = -(-leg.n_tokens // self.config.block_size)
        while (table := self.kv.hold(leg.hashes, n_matched, n_blocks - n_matched)) is None:
            paused = self.paused()
            if paused is None:
                return False
            self.preempt(paused)
        leg.table, leg.room = table, n_blocks * self.config.block_size
        cached = n_matched * self.config.block_size
        leg.computed = min(cached, leg.n_tokens - 1)
        if leg.cached is None:
            leg.cached = cached
        return True

    def seat(self, leg: Leg, n_tokens: int, work: Work) -> None:
        leg.state = "running"
        self.running.append(leg)
        self.did.seated.append((leg.name, self.now_s))
        work.append((leg, n_tokens))

    def compute(self, work: Work) -> None:
        ended: list[Leg] = []
        for leg, n_tokens in work:
            if leg.state != "running" or leg.table is None:
                continue
            leg.computed += n_tokens
            if n_tokens > 1 or not leg.computed % self.config.block_size:
                self.commit(leg, leg.computed)
            if leg.computed == leg.n_tokens and self.generate(leg):
                ended.append(leg)
        for leg in ended:
            self.running.remove(leg)
            if not leg.pins_kv:
                self.free(leg)

    def commit(self, leg: Leg, computed: int) -> None:
        if self.config.prefix_caching and leg.table is not None:
            n_full = computed // self.config.block_size
            leg.hash_blocks(n_full)
            self.kv.commit(leg.table, leg.hashes, n_full)

    def generate(self, leg: Leg) -> bool:
        """Generate a token; whether it is the last."""
        if leg.first_s is None:
            leg.first_s = self.now_s
        leg.prefilling = False
        leg.n_tokens += 1
        leg.outputs += 1
        leg.credit -= 1
        leg.pending += 1
        self.report(leg)
        if leg.outputs == leg.max_tokens:
            leg.finish = 1
        elif leg.outputs in leg.stops_at:
            leg.finish = 2
        if not leg.finish:
            return False
        leg.state = "ended"
        self.did.ended.append((leg.name, leg.first_s, self.now_s, leg.outputs, leg.cached or 0))
        return True
