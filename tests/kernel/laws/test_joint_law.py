"""Pairs chosen together are those that plain loops over all of them find cheapest."""

from collections import Counter
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.constraints import PdSelection, Pin, RoutingConstraints
from kvrouter.core.errors import RoutingRefused
from kvrouter.core.ids import ModelName, RequestId, Slot, Taint, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.taints import topology_taint
from kvrouter.core.workers import Enforcement, KvFormat, ModelRuntimeConfig, Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, RouteRequest, RoutingSettings, View, route
from kvrouter.kernel.routing.fleet_links import links_of
from kvrouter.kernel.routing.interface import CostInput, Speeds
from kvrouter.kernel.topology.link_table import Link, LinkState, LinkTable
from kvrouter.kernel.topology.policy import (
    Fallback,
    MismatchPolicy,
    NearFrontend,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferPolicy,
)
from tests.oracles.pairs import NaivePairs, Option, Refused, Worker
from tests.oracles.prediction import RankLoad
from tests.testing.plain_fleets import worker_card

BLOCK = 16
LEVELS = ("zone", "rack")
ENFORCEMENTS = {
    Required: Enforcement.REQUIRED,
    Fallback: Enforcement.FALLBACK,
    Preferred: Enforcement.PREFERRED,
}
TAINTS = (Taint("gpu"), Taint("fast"), topology_taint("zone", "a"))
ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.BOTH)
NOW_S = 100.0


def draw_load(rng: Random) -> RankLoad:
    return RankLoad(
        overlap_blocks=rng.choice((0, 0, rng.randrange(40))),
        not_active=rng.randrange(40),
        prefill_tokens=rng.choice((0, rng.randrange(40_000))),
        active_blocks=rng.choice((0, rng.randrange(3000))),
        requests=rng.randrange(40),
        waiting=rng.randrange(20),
        total_blocks=rng.choice((64.0, 1000.0, inf)),
        seats=rng.choice((4.0, 256.0, inf)),
        slowness=rng.uniform(0.1, 20.0),
        decode_slowness=rng.uniform(0.1, 20.0),
        turnover=rng.uniform(0.0, 4.0),
        elapsed_s=rng.uniform(0.0, 4.0),
    )


def draw_policy(rng: Random) -> TransferPolicy | None:
    domain = rng.choice(("zone", "rack", "pod"))
    return rng.choice((None, Required(domain), Fallback(domain), Preferred(domain, rng.choice((0.3, 0.8)))))


def draw_worker(
    rng: Random, worker_id: int, levels: tuple[str, ...], *, has_policies: bool, has_formats: bool
) -> Worker:
    role = rng.choice(ROLES)
    return Worker(
        WorkerId(worker_id),
        role,
        {level: rng.choice("ab") for level in (*LEVELS, "pod") if rng.random() < 0.85},
        levels,
        draw_policy(rng) if has_policies and role is Role.PREFILL else None,
        frozenset(taint for taint in TAINTS[:2] if rng.random() < 0.6),
        rng.choice((0, 1000, 262_144)),
        role is Role.DECODE and rng.random() < 0.3,
        rng.random() < 0.9,
        rng.choice(((0, inf), (0, inf), (0, inf), (0, 500), (501, inf))),
        draw_load(rng),
        draw_format(rng) if has_formats else KvFormat(),
    )


def draw_format(rng: Random) -> KvFormat:
    return KvFormat(version=rng.choice(("", "31", "32", "32")), dtype=rng.choice(("", "", "fp8", "bf16")))


def draw_links(rng: Random) -> LinkTable:
    def link() -> Link:
        return Link(rng.uniform(0, 0.01), 10 ** rng.uniform(8, 11), rng.choice((None, 0.02)))

    if rng.random() < 0.15:
        return LinkTable()
    ends = [(rng.choice((*LEVELS, "pod")), rng.choice("ab"), rng.choice("ab")) for _ in range(2)]
    return LinkTable(
        {level: link() for level in LEVELS if rng.random() < 0.7},
        link(),
        {end: link() for end in ends if rng.random() < 0.3},
    )


def draw_request(rng: Random, n_workers: int) -> RouteRequest:
    isl_tokens = rng.choice((1, rng.randrange(1, 600), rng.randrange(1, 40_000)))

    def pin() -> Pin | None:
        return Pin(WorkerId(rng.randrange(n_workers))) if rng.random() < 0.08 else None

    return RouteRequest(
        RequestId(f"r{rng.randrange(10**6)}"),
        isl_tokens,
        -(-isl_tokens // BLOCK),
        RoutingConstraints(
            frozenset(taint for taint in TAINTS[:2] if rng.random() < 0.08),
            {taint: rng.uniform(-1, 1) for taint in TAINTS if rng.random() < 0.2},
            frozenset(taint for taint in TAINTS[:1] if rng.random() < 0.05),
        ),
        pin=pin(),
        prefill_pin=pin(),
        excluded=frozenset(WorkerId(each) for each in range(n_workers) if rng.random() < 0.05),
    )


def draw_settings(rng: Random) -> RoutingSettings:
    default = None
    if rng.random() < 0.15:
        default = RouterTopologyDefault(rng.choice(LEVELS), rng.choice(tuple(MismatchPolicy)))
    return RoutingSettings(
        cost="time",
        pd_selection=PdSelection.JOINT,
        overlap_score_weight=rng.choice((1.0, 1.0, 0.4)),
        active_prefill_tokens_threshold=rng.choice((None, 5000)),
        links=draw_links(rng),
        topology_default=default,
        decode_weight=rng.choice((0.0, 8.0)),
        price_weight=rng.choice((0.0, 3.0)),
        near=draw_near(rng) if rng.random() < 0.2 else None,
    )


def draw_near(rng: Random) -> NearFrontend:
    return NearFrontend(rng.choice(LEVELS), rng.choice(("a", "a", "b", None)), rng.random() < 0.5, 0.6)


def fleet_of(workers: list[Worker]) -> Fleet:
    fleet = Fleet(ModelName("m"), BLOCK)
    for worker in workers:
        policy, load = worker.policy, worker.load
        config = ModelRuntimeConfig(
            topology_domains=worker.domains,
            topology_levels=worker.levels,
            taints=worker.taints,
            kv_bytes_per_token=worker.kv_bytes_per_token,
            kv_transfer_domain=None if policy is None else policy.domain,
            kv_transfer_enforcement=None if policy is None else ENFORCEMENTS[type(policy)],
            kv_transfer_preferred_weight=policy.weight if isinstance(policy, Preferred) else None,
            total_kv_blocks=None if load.total_blocks == inf else int(load.total_blocks),
            max_num_seqs=None if load.seats == inf else int(load.seats),
            prompt_tokens_min=worker.prompts[0] or None,
            prompt_tokens_max=None if worker.prompts[1] == inf else int(worker.prompts[1]),
            kv_format=worker.kv_format,
        )
        fleet.join(
            worker_card(
                worker.worker_id, worker.role, config, block_size=BLOCK, decode_only=worker.decode_only
            )
        )
        fleet.set_alive(worker.worker_id, worker.is_alive)
    return fleet


def view_of(workers: list[Worker], fleet: Fleet, chosen: RoutingSettings, loads: LinkState) -> View:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(worker.load, name) for worker in workers], dtype)

    speeds = Speeds(
        column("slowness", float),
        column("decode_slowness", float),
        column("turnover", float),
        NOW_S - column("elapsed_s", float),
        NOW_S,
        4.0,
    )
    return View(
        fleet=fleet,
        settings=chosen,
        overlap_blocks=column("overlap_blocks", np.uint32),
        prefill_tokens=column("prefill_tokens", np.int64),
        active_blocks=column("active_blocks", np.int64),
        not_active=column("not_active", np.uint32),
        seed=7,
        cost_input=CostInput(column("requests", np.int64), column("waiting", np.int64), speeds, loads),
    )


def draw_transfers(rng: Random, fleet: Fleet, table: LinkTable | None) -> LinkState:
    loads = LinkState()
    if table is not None:
        for _ in range(rng.choice((0, 4))):
            ends = Slot(rng.randrange(fleet.n_slots)), Slot(rng.randrange(fleet.n_slots))
            shared = links_of(fleet, table).shared(*ends)
            if shared is not None:
                loads.add(shared, 10 ** rng.uniform(6, 10))
    return loads


def check(rng: Random) -> str:
    levels = rng.choice((LEVELS, LEVELS, LEVELS[:1], ("rack", "zone"), ()))
    has_policies, has_formats = rng.random() < 0.6, rng.random() < 0.4
    workers = [
        draw_worker(rng, each, levels, has_policies=has_policies, has_formats=has_formats)
        for each in range(rng.randrange(2, 12))
    ]
    fleet, chosen, request = fleet_of(workers), draw_settings(rng), draw_request(rng, len(workers))
    broken = frozenset(
        (one.worker_id, other.worker_id)
        for one in workers
        for other in workers
        if one.role is Role.PREFILL and other.role is not Role.PREFILL and rng.random() < 0.05
    )
    for pair in broken:
        fleet.set_broken_pair(*pair, True)
    loads = draw_transfers(rng, fleet, chosen.links)
    view = view_of(workers, fleet, chosen, loads)
    naive = NaivePairs(workers, request, chosen, block_size=BLOCK, answer_s=4.0, loads=loads, broken=broken)
    outcome: Decision | RoutingRefused
    try:
        outcome = route(request, view, explain=True)
    except RoutingRefused as refused:
        outcome = refused
    if request.prefill_pin is None and not any(
        each.role is Role.PREFILL and each.is_alive for each in workers
    ):
        return "no prefill worker"
    try:
        options = naive.options()
    except Refused:
        assert isinstance(outcome, RoutingRefused)
        return "refused"
    assert isinstance(outcome, Decision)
    check_choice(outcome, options)
    check_rows(outcome, options)
    assert route(request, view) == _without_rows(outcome)
    return "local" if outcome.prefill is None else "pair"


def _without_rows(decision: Decision) -> Decision:
    fields = {name: getattr(decision, name) for name in decision.__struct_fields__}
    return Decision(**{**fields, "rows": ()})


def check_choice(decision: Decision, options: list[Option]) -> None:
    prefill = None if decision.prefill is None else decision.prefill.rank.worker_id
    (taken,) = (
        option
        for option in options
        if option.decode.worker_id == decision.decode.rank.worker_id
        and (None if option.prefill is None else option.prefill.worker_id) == prefill
    )
    cost = decision.decode.cost + (0.0 if decision.prefill is None else decision.prefill.cost)
    assert cost == pytest.approx(taken.cost, rel=1e-9, abs=1e-12)
    assert taken.cost <= min(option.cost for option in options) * (1 + 1e-9) + 1e-12


def check_rows(decision: Decision, options: list[Option]) -> None:
    """Each prefill rank shows its best pair, each decode rank what it would cost alone."""
    least: dict[tuple[Leg, WorkerId], float] = {}
    for option in options:
        key = (
            (Leg.AGGREGATED, option.decode.worker_id)
            if option.prefill is None
            else (Leg.PREFILL, option.prefill.worker_id)
        )
        least[key] = min(option.cost, least.get(key, inf))
    shown = {
        (row.leg, row.rank.worker_id): row.pair_cost
        for row in decision.rows
        if row.leg is not Leg.DECODE and row.pair_cost is not None
    }
    assert shown == pytest.approx(least, rel=1e-9, abs=1e-12)
    with_decode = [row for row in decision.rows if row.leg is Leg.DECODE and row.pair_cost is not None]
    pairs = {
        (option.prefill.worker_id, option.decode.worker_id): option.cost
        for option in options
        if option.prefill is not None
    }
    for row in with_decode:
        assert row.partner is not None
        expected = pairs[row.partner.worker_id, row.rank.worker_id]
        assert row.pair_cost == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if decision.prefill is not None:
        assert {row.partner for row in with_decode} == {decision.prefill.rank}


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_the_cheapest_pair_is_picked_on_shrinkable_fleets(rng: Random) -> None:
    check(rng)


def test_the_cheapest_pair_is_picked_for_thousands_of_requests() -> None:
    seen = Counter(check(Random(seed)) for seed in range(3_000))
    assert min(seen[kind] for kind in ("pair", "local", "refused")) > 150, seen
