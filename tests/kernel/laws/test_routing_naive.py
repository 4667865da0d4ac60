"""Without a policy, the decision is that of a router that has never heard of topology."""

from collections import Counter
from math import exp, tanh
from random import Random
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.constraints import Pin, RouterConfigOverride, RouterMode, RoutingConstraints
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, RoutingRefused
from kvrouter.core.ids import DpRank, ModelName, RequestId, Taint, WorkerId, WorkerRank
from kvrouter.core.workers import ModelRuntimeConfig, Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, Pick, RouteRequest, RoutingSettings, View, route
from tests.testing.plain_fleets import worker_card

BLOCK = 8
TAINTS = (Taint("gpu"), Taint("fast"), Taint("spot"))
MASK64 = (1 << 64) - 1


class Rank(NamedTuple):
    """One worker rank as the naive router sees it."""

    rank: WorkerRank
    role: Role
    ready: bool
    taints: frozenset[Taint]
    total_blocks: int
    overlap_blocks: int
    prefill_tokens: int
    active_blocks: int
    not_active: int


class Choice(NamedTuple):
    """One leg as the naive router decides it."""

    rank: WorkerRank
    prefill_blocks: float
    decode_blocks: float
    multiplier: float
    cost: float
    candidates: int


def splitmix(bits: int) -> int:
    bits = (bits + 0x9E3779B97F4A7C15) & MASK64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK64
    return bits ^ (bits >> 31)


def tie_order(request_id: str, rank: WorkerRank) -> int:
    bits = splitmix(splitmix(rank.worker_id) ^ rank.dp_rank) ^ splitmix(crc32(request_id.encode()))
    bits = (bits * 0xBF58476D1CE4E5B9) & MASK64
    bits ^= bits >> 32
    bits = (bits * 0x94D049BB133111EB) & MASK64
    return bits ^ (bits >> 29)


class Naive:
    """A router of plain loops over ranks: filter, cost, pick, for one leg or for two that do not meet."""

    def __init__(
        self, ranks: list[Rank], request: RouteRequest, chosen: RoutingSettings, seed: int, turn: int
    ):
        self.ranks = sorted(ranks, key=lambda rank: rank.rank)
        self.request, self.settings, self.seed, self.turn = request, chosen, seed, turn

    def decide(self) -> tuple[Choice | None, Choice]:
        prefill = [rank for rank in self.ranks if rank.role is Role.PREFILL]
        decode = [rank for rank in self.ranks if rank.role is not Role.PREFILL]
        if self.request.prefill_pin is None and not any(rank.ready for rank in prefill):
            open_ranks = self.open(decode, self.request.pin)
            return None, self.choose(open_ranks, self.request.pin, prefill=True, decode=True, salt=0)
        firsts = self.open(prefill, self.request.prefill_pin)
        seconds = self.open(decode, self.request.pin)
        first = self.choose(firsts, self.request.prefill_pin, prefill=True, decode=False, salt=1)
        self.turn //= first.candidates
        return first, self.choose(seconds, self.request.pin, prefill=False, decode=True, salt=2)

    def open(self, ranks: list[Rank], pin: Pin | None) -> list[Rank]:
        able = [rank for rank in ranks if self.able(rank, pin)]
        if not able:
            raise LookupError("nobody")
        return able

    def able(self, rank: Rank, pin: Pin | None) -> bool:
        if not rank.ready or rank.rank.worker_id in self.request.excluded:
            return False
        if pin is not None and pin.worker_id != rank.rank.worker_id:
            return False
        return self.request.constraints.required_taints <= rank.taints

    def busy(self, rank: Rank) -> bool:
        fraction = self.settings.active_decode_blocks_threshold
        return fraction is not None and rank.active_blocks / rank.total_blocks > fraction

    def choose(self, able: list[Rank], pin: Pin | None, *, prefill: bool, decode: bool, salt: int) -> Choice:
        free = [rank for rank in able if not self.busy(rank)]
        if not free:
            raise PermissionError("busy")
        choices = [self.cost(rank, pin, len(free), prefill=prefill, decode=decode) for rank in free]
        draw = splitmix(splitmix((self.seed + salt) & MASK64))
        match self.settings.mode:
            case RouterMode.ROUND_ROBIN:
                return choices[self.turn % len(choices)]
            case RouterMode.RANDOM:
                return choices[draw % len(choices)]
            case RouterMode.KV:
                return self.by_cost(choices, draw)

    def by_cost(self, choices: list[Choice], draw: int) -> Choice:
        least, most = min(choice.cost for choice in choices), max(choice.cost for choice in choices)
        temperature = self.settings.temperature
        if temperature == 0.0:
            tied = [choice for choice in choices if choice.cost == least]
            return min(tied, key=lambda choice: tie_order(self.request.request_id, choice.rank))
        span = (most - least) or 1.0
        shares = [exp(-((choice.cost - least) / span) / temperature) for choice in choices]
        aim, reached = (draw >> 11) * 2.0**-53 * sum(shares), 0.0
        for choice, share in zip(choices, shares, strict=True):
            reached += share
            if aim < reached:
                return choice
        return choices[-1]

    def cost(self, rank: Rank, pin: Pin | None, candidates: int, *, prefill: bool, decode: bool) -> Choice:
        missing = max(0, self.request.isl_tokens - rank.overlap_blocks * BLOCK)
        prefill_blocks = (rank.prefill_tokens + missing) / BLOCK if prefill else 0.0
        decode_blocks = float(rank.active_blocks + rank.not_active) if decode else 0.0
        weights = sorted(self.request.constraints.preferred_taints.items()) if pin is None else []
        multiplier = exp(-tanh(sum(weight for taint, weight in weights if taint in rank.taints)))
        cost = (self.settings.overlap_score_weight * prefill_blocks + decode_blocks) * multiplier
        return Choice(rank.rank, prefill_blocks, decode_blocks, multiplier, cost, candidates)


def draw_rank(rng: Random, worker_id: int, *, few: int) -> Rank:
    return Rank(
        WorkerRank(WorkerId(worker_id), DpRank(0)),
        rng.choice((Role.PREFILL, Role.DECODE, Role.BOTH, Role.BOTH)),
        rng.random() < 0.9,
        frozenset(taint for taint in TAINTS if rng.random() < 0.6),
        20,
        *(rng.randrange(few) for _ in range(4)),
    )


def draw_request(rng: Random, n_workers: int) -> RouteRequest:
    isl_tokens = rng.randrange(1, 80)

    def pin() -> Pin | None:
        return Pin(WorkerId(rng.randrange(n_workers))) if rng.random() < 0.1 else None

    return RouteRequest(
        RequestId(f"r{rng.randrange(10**6)}"),
        isl_tokens,
        -(-isl_tokens // BLOCK),
        RoutingConstraints(
            frozenset(taint for taint in TAINTS if rng.random() < 0.1),
            {taint: rng.uniform(-1, 1) for taint in TAINTS if rng.random() < 0.2},
        ),
        RouterConfigOverride(),
        pin(),
        pin(),
        frozenset(WorkerId(worker_id) for worker_id in range(n_workers) if rng.random() < 0.05),
    )


def fleet_of(rng: Random, ranks: list[Rank]) -> Fleet:
    """The same workers, which also say where they are, and ask for nothing."""
    fleet = Fleet(ModelName("m"), BLOCK)
    for rank in ranks:
        config = ModelRuntimeConfig(
            topology_domains={"zone": rng.choice("ab"), "rack": rng.choice("12")},
            topology_levels=("zone", "rack"),
            taints=rank.taints,
            total_kv_blocks=rank.total_blocks,
        )
        fleet.join(worker_card(rank.rank.worker_id, rank.role, config, block_size=BLOCK))
        fleet.set_alive(rank.rank.worker_id, rank.ready)
    return fleet


def same(pick: Pick | None, choice: Choice | None) -> bool:
    if pick is None or choice is None:
        return pick is None and choice is None
    return choice == Choice(
        pick.rank, pick.prefill_blocks, pick.decode_blocks, pick.multiplier, pick.cost, pick.candidates
    )


def check(rng: Random) -> str:
    n_workers = rng.randrange(1, 12)
    few = rng.choice((2, 6, 30))
    ranks = [draw_rank(rng, worker_id, few=few) for worker_id in range(n_workers)]
    chosen = RoutingSettings(
        mode=rng.choice((RouterMode.KV, RouterMode.KV, RouterMode.ROUND_ROBIN, RouterMode.RANDOM)),
        overlap_score_weight=rng.choice((0.0, 1.0, 0.3)),
        temperature=rng.choice((0.0, 0.0, 0.5)),
        active_decode_blocks_threshold=rng.choice((None, 0.29, 0.9)),
    )
    request, seed, turn = draw_request(rng, n_workers), rng.getrandbits(64), rng.randrange(100)
    overlap, prefill_tokens, active_blocks, not_active = np.array([rank[-4:] for rank in ranks], np.int64).T
    view = View(fleet_of(rng, ranks), chosen, overlap, prefill_tokens, active_blocks, not_active, seed, turn)
    outcome: Decision | RoutingRefused
    try:
        outcome = route(request, view)
    except RoutingRefused as refused:
        outcome = refused
    try:
        prefill, decode = Naive(ranks, request, chosen, seed, turn).decide()
    except LookupError:
        assert isinstance(outcome, NoEligibleWorker)
    except PermissionError:
        assert isinstance(outcome, AllWorkersBusy)
    else:
        assert isinstance(outcome, Decision)
        assert same(outcome.prefill, prefill)
        assert same(outcome.decode, decode)
        assert (outcome.constraint, outcome.fallback_used, outcome.cross_domain) == (None, False, False)
    return type(outcome).__name__


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_routing_without_policy_equals_naive_on_shrinkable_fleets(rng: Random) -> None:
    check(rng)


def test_routing_without_policy_equals_naive_on_thousands_of_requests() -> None:
    seen = Counter(check(Random(seed)) for seed in range(5_000))
    assert min(seen[kind] for kind in ("Decision", "NoEligibleWorker", "AllWorkersBusy")) > 100


@pytest.mark.nightly
def test_routing_without_policy_equals_naive_on_a_million_requests() -> None:
    for seed in range(1_000_000):
        check(Random(10_000 + seed))
