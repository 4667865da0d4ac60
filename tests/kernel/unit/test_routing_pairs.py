"""Prefill and decode together: every row of the runtime table, and what cannot be derived."""

import numpy as np
import pytest

from kvrouter.core.constraints import Pin, RouterMode, RoutingConstraints
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason
from kvrouter.core.ids import Epoch, RequestId, Taint, WorkerId
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, RouteRequest, RoutingSettings, View, route, route_decode
from kvrouter.kernel.topology.policy import (
    Fallback,
    MismatchPolicy,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferConstraint,
)
from tests.testing.plain_fleets import fleet_of, idle_view, worker_card

REQUIRED, FALLBACK, PREFERRED = Enforcement.REQUIRED, Enforcement.FALLBACK, Enforcement.PREFERRED
EVERY_MODE = pytest.mark.parametrize("mode", list(RouterMode))
HARD = pytest.mark.parametrize("enforcement", [REQUIRED, FALLBACK, None])


def worker(
    worker_id: int,
    role: Role,
    zone: str | None,
    *,
    enforcement: Enforcement | None = None,
    domain: str | None = None,
    weight: float | None = None,
    taints: tuple[str, ...] = (),
) -> WorkerCard:
    config = ModelRuntimeConfig(
        topology_domains={} if zone is None else {"zone": zone},
        kv_transfer_domain=domain or ("zone" if enforcement else None),
        kv_transfer_enforcement=enforcement,
        kv_transfer_preferred_weight=weight,
        taints=frozenset(map(Taint, taints)),
        total_kv_blocks=100,
    )
    return worker_card(worker_id, role, config)


def prefill(worker_id: int, zone: str | None, enforcement: Enforcement | None = REQUIRED) -> WorkerCard:
    return worker(
        worker_id,
        Role.PREFILL,
        zone,
        enforcement=enforcement,
        weight=0.5 if enforcement is PREFERRED else None,
    )


def decode(worker_id: int, zone: str | None, *taints: str) -> WorkerCard:
    return worker(worker_id, Role.DECODE, zone, taints=taints)


def view(
    fleet: Fleet,
    active: dict[int, int] | None = None,
    *,
    mode: RouterMode = RouterMode.KV,
    threshold: float | None = None,
    default: RouterTopologyDefault | None = None,
    turn: int = 0,
) -> View:
    blocks = np.zeros(fleet.n_slots, np.int64)
    for worker_id, count in (active or {}).items():
        blocks[list(fleet.slots_of(WorkerId(worker_id)))] = count
    settings = RoutingSettings(mode=mode, active_decode_blocks_threshold=threshold, topology_default=default)
    return idle_view(fleet, settings, active_blocks=blocks, turn=turn)


def request(
    *required: str, pin: int | None = None, prefill_pin: int | None = None, name: str = "r"
) -> RouteRequest:
    return RouteRequest(
        RequestId(name),
        8,
        2,
        constraints=RoutingConstraints(required_taints=frozenset(map(Taint, required))),
        pin=None if pin is None else Pin(WorkerId(pin)),
        prefill_pin=None if prefill_pin is None else Pin(WorkerId(prefill_pin)),
    )


def ids(decision: Decision) -> tuple[int, int]:
    assert decision.prefill is not None
    return decision.prefill.rank.worker_id, decision.decode.rank.worker_id


@EVERY_MODE
def test_required_keeps_the_pair_in_one_domain(mode: RouterMode) -> None:
    fleet = fleet_of(prefill(1, "a"), prefill(2, "b"), decode(3, "a"), decode(4, "b"))
    for turn in range(8):
        decision = route(request(name=f"r{turn}"), view(fleet, {3: 50}, mode=mode, turn=turn))
        assert ids(decision) in {(1, 3), (2, 4)}
        assert (decision.cross_domain, decision.fallback_used) == (False, False)


def test_the_decision_has_the_transfer_constraint() -> None:
    decision = route(request(), view(fleet_of(prefill(1, "a"), decode(3, "a"))))
    assert decision.constraint == TransferConstraint(Required("zone"), "a")
    assert decision.constraint.taint == "dynamo.topology/zone=a"


def test_required_without_a_decode_worker_is_refused_before_any_leg_is_sent() -> None:
    fleet = fleet_of(prefill(1, "a"), decode(3, "b"), decode(4, None))
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(), view(fleet))
    assert (refused.value.role, refused.value.domain) == ("decode", "zone")
    assert refused.value.refusals == {Reason.DOMAIN_UNKNOWN: 1, Reason.DOMAIN_MISMATCH: 1}
    assert "KV keeps to zone a" in str(refused.value)


@EVERY_MODE
def test_fallback_without_a_decode_worker_in_the_domain_picks_any(mode: RouterMode) -> None:
    fleet = fleet_of(prefill(1, "a", FALLBACK), decode(3, "b"), decode(4, None))
    decision = route(request(), view(fleet, {3: 9}, mode=mode))
    assert ids(decision) in {(1, 3), (1, 4)}
    assert decision.decode.candidates == 2
    assert (decision.cross_domain, decision.fallback_used) == (True, True)


@HARD
def test_decode_workers_without_a_value_lose_to_workers_in_the_domain(
    enforcement: Enforcement | None,
) -> None:
    default = RouterTopologyDefault("zone", MismatchPolicy.FALLBACK)
    fleet = fleet_of(prefill(1, "a", enforcement), decode(3, "a"), decode(4, None))
    decision = route(request(), view(fleet, {3: 50}, default=default))
    assert ids(decision) == (1, 3)
    assert not decision.fallback_used


def test_decode_ranks_of_any_domain_are_eligible_without_a_policy() -> None:
    fleet = fleet_of(prefill(1, "a", None), decode(3, "a"), decode(4, None))
    decision = route(request(), view(fleet, {3: 50}))
    assert ids(decision) == (1, 4)
    assert (decision.constraint, decision.cross_domain) == (None, False)


@HARD
def test_prefill_workers_with_a_decode_worker_in_their_domain_come_first(
    enforcement: Enforcement | None,
) -> None:
    default = RouterTopologyDefault("zone")
    fleet = fleet_of(prefill(1, "a", enforcement), prefill(2, "b", enforcement), decode(3, "b"))
    for number in range(8):
        assert ids(route(request(name=f"r{number}"), view(fleet, default=default))) == (2, 3)


def test_the_routers_default_applies_to_workers_without_a_policy() -> None:
    fleet = fleet_of(prefill(1, "a", None), decode(3, "b"))
    with pytest.raises(NoEligibleWorker):
        route(request(), view(fleet, default=RouterTopologyDefault("zone")))
    lenient = RouterTopologyDefault("zone", MismatchPolicy.FALLBACK)
    assert route(request(), view(fleet, default=lenient)).fallback_used
    own = fleet_of(prefill(1, "a", FALLBACK), decode(3, "b"))
    assert route(request(), view(own, default=RouterTopologyDefault("zone"))).fallback_used


def test_a_prefill_worker_without_its_value_fails_closed_under_required() -> None:
    fleet = fleet_of(prefill(1, None), decode(3, "a"))
    with pytest.raises(NoEligibleWorker, match="whose value the prefill worker does not publish") as refused:
        route(request(), view(fleet))
    assert refused.value.refusals == {Reason.DOMAIN_UNKNOWN: 1}
    assert refused.value.domain == "zone"


def test_fallback_and_preferred_work_without_a_prefill_domain_value() -> None:
    fallen = route(request(), view(fleet_of(prefill(1, None, FALLBACK), decode(3, "a"))))
    assert (fallen.constraint, fallen.fallback_used) == (TransferConstraint(Fallback("zone"), None), True)
    assert fallen.cross_domain
    preferred = route(request(), view(fleet_of(prefill(1, None, PREFERRED), decode(3, "a"))))
    assert preferred.constraint == TransferConstraint(Preferred("zone", 0.5), None)
    assert (preferred.decode.multiplier, preferred.fallback_used) == (1.0, False)


def test_two_workers_without_a_value_are_not_in_one_domain() -> None:
    with pytest.raises(NoEligibleWorker):
        route(request(), view(fleet_of(prefill(1, None), decode(3, None))))


def test_a_domain_without_an_enforcement_is_required() -> None:
    bare = worker(1, Role.PREFILL, "a", domain="zone")
    with pytest.raises(NoEligibleWorker):
        route(request(), view(fleet_of(bare, decode(3, "b"))))


def test_preferred_lets_cost_decide_across_domains() -> None:
    fleet = fleet_of(prefill(1, "a", PREFERRED), decode(3, "a"), decode(4, "b"))
    near = route(request(), view(fleet, {3: 5, 4: 5}))
    assert (ids(near), near.cross_domain) == ((1, 3), False)
    far = route(request(), view(fleet, {3: 50, 4: 5}))
    assert (ids(far), far.cross_domain, far.fallback_used) == ((1, 4), True, False)


def test_required_taints_apply_to_both_legs_of_a_pair() -> None:
    fleet = fleet_of(
        worker(1, Role.PREFILL, "a", enforcement=REQUIRED, taints=("gpu",)),
        worker(2, Role.PREFILL, "b", enforcement=REQUIRED, taints=("gpu",)),
        decode(3, "a"),
        decode(4, "b", "gpu"),
    )
    assert ids(route(request("gpu"), view(fleet, {4: 90}))) == (2, 4)
    with pytest.raises(NoEligibleWorker):
        route(request("gpu", prefill_pin=1), view(fleet))


def test_a_request_may_require_a_zone_by_its_taint() -> None:
    fleet = fleet_of(prefill(1, "a"), prefill(2, "b"), decode(3, "a"), decode(4, "b"))
    assert ids(route(request("dynamo.topology/zone=b"), view(fleet, {4: 90}))) == (2, 4)


@EVERY_MODE
def test_pinned_pairs_keep_to_the_required_domain(mode: RouterMode) -> None:
    fleet = fleet_of(prefill(1, "a"), prefill(2, "b"), decode(3, "a"), decode(4, "b"))
    assert ids(route(request(prefill_pin=1), view(fleet, mode=mode))) == (1, 3)
    assert ids(route(request(pin=4), view(fleet, mode=mode))) == (2, 4)
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(prefill_pin=1, pin=4), view(fleet, mode=mode))
    assert refused.value.refusals == {Reason.PINNED_ELSEWHERE: 1, Reason.DOMAIN_MISMATCH: 1}


def test_a_domain_with_free_decode_workers_wins_over_a_busy_domain() -> None:
    fleet = fleet_of(prefill(1, "a"), prefill(2, "b"), decode(3, "a"), decode(4, "b"))
    assert ids(route(request(), view(fleet, {3: 90}, threshold=0.5))) == (2, 4)
    with pytest.raises(AllWorkersBusy) as busy:
        route(request(), view(fleet, {3: 90, 4: 90}, threshold=0.5))
    assert (busy.value.role, busy.value.refusals) == ("decode", {Reason.BUSY: 2})
    with pytest.raises(AllWorkersBusy) as pinned:
        route(request(prefill_pin=1), view(fleet, {3: 90}, threshold=0.5))
    assert pinned.value.refusals == {Reason.BUSY: 1, Reason.DOMAIN_MISMATCH: 1}
    lenient = fleet_of(prefill(1, "a", FALLBACK), decode(3, "a"), decode(4, "b"))
    assert route(request(), view(lenient, {3: 90}, threshold=0.5)).fallback_used


def test_a_refusal_by_busy_prefill_workers_names_prefill() -> None:
    fleet = fleet_of(prefill(1, "a"), prefill(2, "b"), decode(3, "a"))
    with pytest.raises(AllWorkersBusy, match="every prefill worker") as busy:
        route(request(), view(fleet, {1: 90}, threshold=0.5))
    assert (busy.value.role, busy.value.refusals) == (
        "prefill",
        {Reason.DOMAIN_MISMATCH: 1, Reason.BUSY: 1},
    )


def test_a_pair_without_an_eligible_prefill_rank_names_prefill() -> None:
    fleet = fleet_of(prefill(1, "a"), decode(3, "a", "gpu"))
    with pytest.raises(NoEligibleWorker) as refused:
        route(request("gpu"), view(fleet))
    assert (refused.value.role, refused.value.refusals) == ("prefill", {Reason.TAINT_MISSING: 1})


def test_a_pair_without_decode_workers_is_refused_with_its_domain() -> None:
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(), view(fleet_of(prefill(1, "a"))))
    assert (refused.value.role, refused.value.domain) == ("decode", "zone")


def test_an_aggregated_fleet_is_never_constrained() -> None:
    both = [worker(number, Role.BOTH, zone, enforcement=REQUIRED) for number, zone in ((1, "a"), (2, None))]
    default = RouterTopologyDefault("rack")
    decision = route(request(), view(fleet_of(*both), default=default))
    assert (decision.prefill, decision.constraint, decision.decode.candidates) == (None, None, 2)


def test_decode_is_picked_again_under_the_frozen_constraint() -> None:
    fleet = fleet_of(prefill(1, "a"), decode(3, "a"), decode(4, "a"), decode(5, "b"))
    first = route(request(), view(fleet, {4: 9}))
    assert ids(first) == (1, 3)
    fleet.leave(WorkerId(1), Epoch(1))
    again = route_decode(request(), view(fleet, {3: 50, 4: 9}), first.constraint, explain=True)
    assert (again.decode.rank.worker_id, again.prefill, again.constraint) == (4, None, first.constraint)
    assert {row.rank.worker_id: row.refused for row in again.rows} == {
        3: None,
        4: None,
        5: Reason.DOMAIN_MISMATCH,
    }
    for gone in (3, 4):
        fleet.leave(WorkerId(gone), Epoch(1))
    with pytest.raises(NoEligibleWorker) as refused:
        route_decode(request(), view(fleet), first.constraint)
    assert (refused.value.domain, refused.value.refusals) == ("zone", {Reason.DOMAIN_MISMATCH: 1})


def test_prefill_has_no_decode_blocks_and_decode_no_prefill_blocks() -> None:
    decision = route(request(), view(fleet_of(prefill(1, "a"), decode(3, "a")), {1: 7, 3: 7}))
    assert decision.prefill is not None
    assert (decision.prefill.prefill_blocks, decision.prefill.decode_blocks) == (2.0, 0.0)
    assert (decision.decode.prefill_blocks, decision.decode.decode_blocks) == (0.0, 9.0)
