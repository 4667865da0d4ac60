"""Laws of the decision, held against a brute force over all pairs that shares no code with it."""

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.requests import Leg
from kvrouter.kernel.routing import Candidate, Decision, RouteRequest, View, route, route_decode
from kvrouter.kernel.topology.policy import Required
from tests.testing.routing_cases import BruteForceRouter, RoutingCase, case_fleet, routing_cases, view_of


def check_accepted(brute: BruteForceRouter, decision: Decision) -> None:
    if not brute.is_pair:
        assert decision.prefill is None
        assert decision.constraint is None
        assert decision.decode.rank in brute.able(Leg.AGGREGATED)
        assert decision.decode.candidates == len(brute.able(Leg.AGGREGATED))
        return
    assert decision.prefill is not None
    prefill, decode = decision.prefill.rank, decision.decode.rank
    pairs = brute.pairs()
    assert (prefill, decode) in pairs
    assert decision.prefill.candidates == len({first for first, _ in pairs})
    assert decision.decode.candidates == sum(first == prefill for first, _ in pairs)
    policy = brute.policy(prefill)
    together = policy is not None and brute.together(prefill, decode, policy[0])
    assert decision.cross_domain == (policy is not None and not together)
    assert decision.fallback_used == (policy is not None and policy[1] == "fallback" and not together)
    if policy is not None and policy[1] == "required":
        assert together


def check_refused(brute: BruteForceRouter, refused: RoutingRefused) -> None:
    if brute.is_pair:
        assert not brute.pairs()
        only_busy = bool(brute.pairs(even_busy=True))
    else:
        assert not brute.able(Leg.AGGREGATED)
        only_busy = bool(brute.able(Leg.AGGREGATED, even_busy=True))
    assert isinstance(refused, AllWorkersBusy if only_busy else NoEligibleWorker)
    assert (Reason.BUSY in refused.refusals) == only_busy
    leg = Leg.PREFILL if refused.role == "prefill" else Leg.DECODE
    ranks = brute.role(leg)
    if not ranks:
        assert refused.refusals == {Reason.WRONG_ROLE: len(brute.card)}
        return
    own = Counter(reason for rank in ranks if (reason := brute.refused(rank, leg)) is not None)
    later = {Reason.BUSY, Reason.DOMAIN_MISMATCH, Reason.DOMAIN_UNKNOWN}
    assert {reason: count for reason, count in refused.refusals.items() if reason not in later} == own
    assert sum(refused.refusals.values()) == len(ranks)


def check_explained(brute: BruteForceRouter, request: RouteRequest, view: View, decision: Decision) -> None:
    explained = route(request, view, explain=True)
    assert msgspec.structs.replace(explained, rows=()) == decision
    for pick in filter(None, (decision.prefill, decision.decode)):
        rows = [row for row in explained.rows if row.leg is pick.leg]
        assert [row.rank for row in rows] == sorted(brute.role(pick.leg))
        for row in rows:
            own = brute.refused(row.rank, row.leg)
            assert own is None or row.refused is own
        open_rows = [row for row in rows if row.refused is None]
        assert len(open_rows) == pick.candidates
        (picked,) = (row for row in rows if row.picked)
        assert picked in open_rows
        for field in Candidate.__struct_fields__:
            if field not in ("refused", "picked", "pair_cost", "partner"):
                assert getattr(picked, field) == getattr(pick, field)
        if decision.mode is RouterMode.KV and view.settings.temperature == 0.0:
            assert picked.cost == min(row.cost for row in open_rows)


def check_counted(refused: RoutingRefused) -> list[Candidate]:
    """The rows of the leg that the refusal names are what it counts; returns all of them."""
    rows = [row for row in refused.rows if isinstance(row, Candidate)]
    assert len(rows) == len(refused.rows)
    named = [row for row in rows if (row.leg is Leg.PREFILL) == (refused.role == "prefill")]
    assert Counter(row.refused for row in named) == Counter(refused.refusals)
    return rows


def check_refusal_explained(brute: BruteForceRouter, view: View, refused: RoutingRefused) -> None:
    """Asked for an explanation, the same refusal has the rows of each leg, with true reasons and costs."""
    case = brute.scene
    with pytest.raises(type(refused)) as raised:
        route(case.request, view, explain=True)
    explained = raised.value
    reported = (refused.message, refused.refusals, refused.role, refused.domain)
    assert (explained.message, explained.refusals, explained.role, explained.domain) == reported
    assert refused.rows == ()
    rows = check_counted(explained)
    for leg in (Leg.PREFILL, Leg.DECODE) if brute.is_pair else (Leg.AGGREGATED,):
        of_leg = [row for row in rows if row.leg is leg]
        assert [row.rank for row in of_leg] == sorted(brute.role(leg) or brute.card)
        for row in of_leg:
            check_stopped(brute, row)
            check_cost(case, row)


def check_stopped(brute: BruteForceRouter, row: Candidate) -> None:
    """The row's reason is the first one by the rules; an open row's other leg is what nobody may take."""
    assert not row.picked
    own = brute.refused(row.rank, row.leg) if brute.role(row.leg) else Reason.WRONG_ROLE
    if own is not None or not brute.is_pair:
        assert row.refused is (own or Reason.BUSY)
        return
    mates = brute.able(Leg.DECODE if row.leg is Leg.PREFILL else Leg.PREFILL, even_busy=True)
    suits = [mate for mate in mates if brute.may_pair(row, mate)]
    if mates and not suits:
        assert row.refused in (Reason.DOMAIN_UNKNOWN, Reason.DOMAIN_MISMATCH)
    elif brute.busy(row.rank):
        assert row.refused is Reason.BUSY
    elif row.refused is Reason.BUSY:
        assert row.leg is Leg.PREFILL
        assert all(map(brute.busy, suits))
    else:
        assert row.refused is None


def check_cost(case: RoutingCase, row: Candidate) -> None:
    load, request = case.loads[row.rank], case.request
    missing = max(0, request.isl_tokens - load.overlap_blocks * 4)
    prefill_blocks = 0.0 if row.leg is Leg.DECODE else (load.prefill_tokens + missing) / 4
    decode_blocks = 0.0 if row.leg is Leg.PREFILL else float(load.active_blocks + load.not_active)
    assert (row.overlap_blocks, row.prefill_blocks) == (load.overlap_blocks, prefill_blocks)
    assert (row.decode_blocks, row.transfer_blocks) == (decode_blocks, 0.0)
    weight = case.settings.overlap_score_weight
    assert row.cost == (weight * prefill_blocks + decode_blocks) * row.multiplier


def check_again(request: RouteRequest, view: View, decision: Decision) -> None:
    """A decode worker picked again is one that the first decision could have picked."""
    again = route_decode(request, view, decision.constraint)
    assert again.decode.candidates == decision.decode.candidates
    assert (again.fallback_used, again.constraint) == (decision.fallback_used, decision.constraint)
    if decision.constraint is not None and isinstance(decision.constraint.policy, Required):
        assert not again.cross_domain


def check_nobody_again(request: RouteRequest, view: View, decision: Decision) -> None:
    """Picked again until every decode worker has failed the request, the refusal has their rows."""
    excluded = request.excluded
    while True:
        failed = msgspec.structs.replace(request, excluded=excluded)
        try:
            again = route_decode(failed, view, decision.constraint, explain=True)
        except RoutingRefused as refused:
            rows = check_counted(refused)
            assert {row.rank.worker_id for row in rows if row.refused is Reason.EXCLUDED} <= excluded
            assert not any(row.picked for row in rows)
            return
        assert again.decode.rank.worker_id not in excluded
        excluded |= {again.decode.rank.worker_id}


def check_join_order(case: RoutingCase, decision: Decision, rng: Random) -> None:
    shuffled = rng.sample(case.cards, len(case.cards))
    fleet = case_fleet(case, tuple(shuffled))
    other = route(case.request, view_of(case, fleet))
    assert other.decode.rank == decision.decode.rank
    assert (other.prefill and other.prefill.rank) == (decision.prefill and decision.prefill.rank)


def check_all(rng: Random, n_requests: int) -> Counter[str]:
    """Hold every law on some requests to one fleet; count what happened."""
    seen: Counter[str] = Counter()
    fleet = None
    for case in routing_cases(rng, n_requests):
        fleet = fleet or case_fleet(case, case.cards)
        view, brute = view_of(case, fleet), BruteForceRouter(case)
        try:
            decision = route(case.request, view)
        except RoutingRefused as refused:
            seen[type(refused).__name__] += 1
            check_refused(brute, refused)
            check_refusal_explained(brute, view, refused)
            continue
        seen["pair" if decision.prefill else "aggregated"] += 1
        seen["fallback"] += decision.fallback_used
        check_accepted(brute, decision)
        check_explained(brute, case.request, view, decision)
        if decision.prefill is not None:
            check_again(case.request, view, decision)
        if case.request.request_id == "r0":
            check_join_order(case, decision, rng)
            check_nobody_again(case.request, view, decision)
    return seen


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_routing_matches_brute_force_on_shrinkable_fleets(rng: Random) -> None:
    check_all(rng, 2)


def test_routing_matches_brute_force_on_thousands_of_requests() -> None:
    seen: Counter[str] = Counter()
    for seed in range(2_000):
        seen += check_all(Random(seed), 5)
    assert min(seen[kind] for kind in ("pair", "aggregated", "fallback")) > 100
    assert min(seen[kind] for kind in ("NoEligibleWorker", "AllWorkersBusy")) > 100


@pytest.mark.nightly
def test_routing_matches_brute_force_on_a_million_requests() -> None:
    for seed in range(50_000):
        check_all(Random(10_000 + seed), 20)
