"""The kept inputs of decisions and refusals: bounded in number and in bytes, and counted right."""

import pytest

from kvrouter.core.errors import NoEligibleWorker, Reason
from kvrouter.core.ids import RequestId
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.decision_input import FLEET_BYTES_PER_SLOT, DecisionInput, decision_input
from kvrouter.kernel.routing.interface import RouteRequest
from kvrouter.router import kept_inputs
from kvrouter.router.kept_inputs import KeptInputs, RefusalLog
from kvrouter.router.model_router import DecisionLog
from tests.router.unit.test_service_decisions import decision
from tests.testing.constants import SetConstants
from tests.testing.plain_fleets import fleet_of, idle_view, worker_card

RANKS = 100


def fleet_of_ranks() -> Fleet:
    return fleet_of(worker_card(1, dp_size=RANKS))


def input_on(fleet: Fleet, request_id: str = "r") -> DecisionInput:
    return decision_input(RouteRequest(RequestId(request_id), 8, 2), idle_view(fleet))


def key(number: int) -> tuple[RequestId, float]:
    return RequestId(f"r{number}"), float(number)


def test_inputs_are_bounded_in_bytes_and_the_oldest_is_dropped_first(set_constants: SetConstants) -> None:
    fleet, kept = fleet_of_ranks(), KeptInputs()
    one = input_on(fleet)
    set_constants(kept_inputs, INPUTS_BYTES_MAX=one.fleet_bytes + 3 * one.n_bytes)
    for number in range(10):
        kept.put(key(number), input_on(fleet))
        assert kept.n_bytes <= one.fleet_bytes + 3 * one.n_bytes
    assert [number for number in range(10) if kept.get(key(number)) is not None] == [7, 8, 9]


def test_a_fleet_that_changes_between_decisions_counts_each_time(set_constants: SetConstants) -> None:
    fleet, kept = fleet_of_ranks(), KeptInputs()
    one = input_on(fleet)
    set_constants(kept_inputs, INPUTS_BYTES_MAX=2 * (one.fleet_bytes + one.n_bytes))
    for number in range(10):
        fleet.set_alive(worker_card(1).worker_id, alive=bool(number % 2))
        kept.put(key(number), input_on(fleet))
    assert len(kept) == 2


def test_an_input_above_the_bound_is_kept_alone(set_constants: SetConstants) -> None:
    set_constants(kept_inputs, INPUTS_BYTES_MAX=1)
    fleet, kept = fleet_of_ranks(), KeptInputs()
    for number in range(3):
        kept.put(key(number), input_on(fleet))
    assert (len(kept), kept.get(key(2)) is not None) == (1, True)


def test_dropped_inputs_leave_no_bytes_behind() -> None:
    fleet, kept = fleet_of_ranks(), KeptInputs()
    for number in range(5):
        kept.put(key(number), input_on(fleet))
        kept.put(key(number), input_on(fleet))
        fleet.set_alive(worker_card(1).worker_id, alive=bool(number % 2))
    for number in (3, 0, 1, 2, 4, 4):
        kept.drop(key(number))
    assert (len(kept), kept.n_bytes) == (0, 0)


def test_the_size_of_an_input_is_that_of_its_columns() -> None:
    kept = input_on(fleet_of_ranks())
    columns = sum(len(column) for column in kept.columns if column is not None)
    assert columns <= kept.n_bytes <= columns + 58 * RANKS + 4096
    assert kept.fleet_bytes >= FLEET_BYTES_PER_SLOT * RANKS


def test_requests_and_attempts_that_are_dropped_take_their_inputs_along() -> None:
    fleet, log = fleet_of_ranks(), DecisionLog(requests_max=2)
    for number in range(40):
        request_id = f"r{number // 20}"
        log.record(decision(request_id), decided_at_s=float(number), decision_input=input_on(fleet))
    assert len(log._inputs) == 2 * 16
    log.record(decision("b"), decided_at_s=50.0, decision_input=input_on(fleet))
    log.record(decision("c"), decided_at_s=51.0, decision_input=input_on(fleet))
    assert len(log._inputs) == 2


@pytest.mark.parametrize(("requests_max", "kept"), [(0, []), (2, ["b", "c"])])
def test_refusals_are_bounded_and_an_id_is_kept_once(requests_max: int, kept: list[str]) -> None:
    log, fleet = RefusalLog(requests_max=requests_max), fleet_of_ranks()
    error = NoEligibleWorker("no", refusals={Reason.NOT_ALIVE: 3})
    for at_s, request_id in enumerate("abcbb"):
        log.record(error, input_on(fleet, request_id), refused_at_s=at_s, mode="kv", trace_id="t", model="m")
    assert [each for each in "abc" if log.get(RequestId(each)) is not None] == kept
    assert len(log._inputs) == len(kept)
    if kept:
        refusal = log.get(RequestId("b"))
        assert refusal is not None
        assert refusal.input is not None
        assert (refusal.refused_at_s, refusal.refusals) == (4, {"not_alive": 3})


def test_refusals_drop_no_decision() -> None:
    log, fleet = DecisionLog(requests_max=1), fleet_of_ranks()
    log.record(decision("a"), decided_at_s=0.0, decision_input=input_on(fleet))
    error = NoEligibleWorker("no", refusals={})
    for number in range(5):
        log.refusals.record(
            error, input_on(fleet, f"r{number}"), refused_at_s=1.0, mode="kv", trace_id="", model="m"
        )
    assert log.get(RequestId("a")) is not None
