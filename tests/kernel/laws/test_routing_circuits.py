"""Open circuits and lost handoffs steer decisions, and refuse nobody whom all closed circuits would serve."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.errors import NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, View, route
from tests.testing.routing_cases import BruteForceRouter, RoutingCase, case_fleet, routing_cases, view_of


def outcome(case: RoutingCase, view: View) -> Decision | type[RoutingRefused]:
    try:
        return route(case.request, view)
    except RoutingRefused as refused:
        return type(refused)


def drawn(seed: int) -> tuple[Random, RoutingCase, Fleet]:
    rng = Random(seed)
    case = next(routing_cases(rng, 1))
    return rng, case, case_fleet(case, case.cards)


def some(rng: Random, case: RoutingCase) -> list[WorkerId]:
    return [card.worker_id for card in case.cards if rng.random() < 0.4]


@given(st.integers(0, 2**32))
def test_open_circuits_count_as_dead_except_as_last_resort(seed: int) -> None:
    rng, case, fleet = drawn(seed)
    plain = outcome(case, view_of(case, fleet))
    dead = case_fleet(case, case.cards)
    for worker_id in some(rng, case):
        fleet.set_circuit_open(worker_id, True)
        dead.set_alive(worker_id, False)
    without = outcome(case, view_of(case, dead))
    got = outcome(case, view_of(case, fleet))
    if without is not NoEligibleWorker:
        assert got == without
    elif isinstance(plain, Decision):
        assert got == structs.replace(plain, last_resort=fleet.has_open_circuits)
    else:
        assert got == plain


@given(st.integers(0, 2**32))
def test_a_broken_pair_is_reused_only_if_every_pair_of_its_tier_is_broken(seed: int) -> None:
    for number in range(20):  # few of the fleets have several pairs
        check_broken_pairs(seed + number)


def check_broken_pairs(seed: int) -> None:
    rng, case, fleet = drawn(seed)
    plain = outcome(case, view_of(case, fleet))
    broken = {(a, b) for a in some(rng, case) for b in some(rng, case)}
    for prefill, decode in broken:
        fleet.set_broken_pair(prefill, decode, True)
    got = outcome(case, view_of(case, fleet))
    assert isinstance(got, Decision) == isinstance(plain, Decision)
    if not isinstance(got, Decision) or got.prefill is None:
        assert got == plain
        return
    pair = (got.prefill.rank, got.decode.rank)
    brute = BruteForceRouter(case)
    policy = brute.policy(pair[0])
    if policy is not None and policy[1] == "required":
        assert brute.together(*pair, policy[0]), "lost KV opens no boundary"
    if (pair[0].worker_id, pair[1].worker_id) in broken:
        whole = {(a, b) for a, b in brute.pairs() if (a.worker_id, b.worker_id) not in broken}
        assert not whole, "some pair of the same tier could have taken it"


@given(st.integers(0, 2**32))
def test_explain_equals_the_decision_with_open_circuits_and_broken_pairs(seed: int) -> None:
    rng, case, fleet = drawn(seed)
    for worker_id in some(rng, case):
        fleet.set_circuit_open(worker_id, True)
    for prefill in some(rng, case):
        for decode in some(rng, case):
            fleet.set_broken_pair(prefill, decode, True)
    view = view_of(case, fleet)
    try:
        decision = route(case.request, view, explain=True)
    except RoutingRefused:
        return
    assert structs.replace(decision, rows=()) == route(case.request, view)
    for pick in (decision.decode, decision.prefill):
        if pick is None:
            continue
        rows = [row for row in decision.rows if row.leg is pick.leg]
        assert [row.rank for row in rows if row.picked] == [pick.rank]
        assert sum(row.refused is None for row in rows) == pick.candidates
        if pick.leg is not Leg.PREFILL and decision.last_resort:
            assert all(row.refused is not Reason.CIRCUIT_OPEN for row in rows)
