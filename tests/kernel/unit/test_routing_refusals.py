"""Who may not take a request, and what is said about it."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvrouter.core.constraints import Pin, RouterMode, RoutingConstraints
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import DpRank, Epoch, ModelName, RequestId, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import LoadReport, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Candidate, RouteRequest, RoutingSettings, View, explain, route
from tests.testing.calls import MakeFail
from tests.testing.plain_fleets import fleet_of, idle_view, worker_card

EVERY_MODE = pytest.mark.parametrize("mode", list(RouterMode))


def worker(worker_id: int, *taints: str, role: Role = Role.BOTH, **fields: Any) -> WorkerCard:
    config = ModelRuntimeConfig(taints=frozenset(map(Taint, taints)), total_kv_blocks=100)
    return worker_card(worker_id, role, config, **fields)


def view(
    fleet: Fleet,
    *,
    mode: RouterMode = RouterMode.KV,
    fraction: float | None = None,
    tokens: int | None = None,
    active: int = 0,
    prefill_tokens: int = 0,
) -> View:
    settings = RoutingSettings(
        mode=mode, active_decode_blocks_threshold=fraction, active_prefill_tokens_threshold=tokens
    )
    return idle_view(
        fleet,
        settings,
        prefill_tokens=np.full(fleet.n_slots, prefill_tokens, np.int64),
        active_blocks=np.full(fleet.n_slots, active, np.int64),
    )


def request(
    *required: str, pin: Pin | None = None, prefill_pin: Pin | None = None, excluded: tuple[int, ...] = ()
) -> RouteRequest:
    return RouteRequest(
        RequestId("r"),
        8,
        2,
        constraints=RoutingConstraints(required_taints=frozenset(map(Taint, required))),
        pin=pin,
        prefill_pin=prefill_pin,
        excluded=frozenset(map(WorkerId, excluded)),
    )


@EVERY_MODE
def test_a_worker_needs_every_required_taint(mode: RouterMode) -> None:
    fleet = fleet_of(worker(1, "gpu"), worker(2, "gpu", "fast"), worker(3, "fast"))
    for _ in range(4):
        assert route(request("gpu", "fast"), view(fleet, mode=mode)).decode.rank.worker_id == 2


@EVERY_MODE
def test_a_worker_whose_engine_is_silent_is_not_picked(mode: RouterMode) -> None:
    fleet = fleet_of(worker(1, engine_silent=True), worker(2), worker(3, engine_silent=True))
    assert [route(request(), view(fleet, mode=mode)).decode.rank.worker_id for _ in range(6)] == [2] * 6


@EVERY_MODE
def test_each_rank_is_counted_once_under_its_first_refusal_reason(mode: RouterMode) -> None:
    fleet = fleet_of(
        worker(1, draining=True),
        worker(2, draining=True),
        worker(3),
        worker(4),
        worker(5, dp_size=2),
        worker(6, role=Role.PREFILL),
        worker(7, draining=True, engine_silent=True),
        worker(8, engine_silent=True),
        worker(9, engine_silent=True),
    )
    fleet.set_alive(WorkerId(1), alive=False)
    fleet.set_alive(WorkerId(6), alive=False)
    fleet.set_alive(WorkerId(9), alive=False)
    asked = request("gpu", pin=Pin(WorkerId(4)), excluded=(3,))
    with pytest.raises(NoEligibleWorker) as refused:
        route(asked, view(fleet, mode=mode, fraction=0.5, active=90))
    assert refused.value.refusals == {
        Reason.NOT_ALIVE: 2,
        Reason.DRAINING: 2,
        Reason.ENGINE_SILENT: 1,
        Reason.EXCLUDED: 1,
        Reason.PINNED_ELSEWHERE: 2,
        Reason.TAINT_MISSING: 1,
    }
    assert (refused.value.role, refused.value.domain) == ("decode", None)
    message = str(refused.value)
    for part in ("no decode worker", "of 9 decode ranks", "2 not_alive", "pinned to 4, a worker for both"):
        assert part in message


def test_all_ranks_have_wrong_role_without_a_rank_of_the_role() -> None:
    fleet = fleet_of(worker(1, role=Role.PREFILL), worker(2, role=Role.PREFILL))
    with pytest.raises(NoEligibleWorker, match="2 worker ranks are here, none of them for decode") as refused:
        route(request(), view(fleet))
    assert refused.value.refusals == {Reason.WRONG_ROLE: 2}
    assert refused.value.role == "decode"


def test_an_empty_fleet_refuses_a_request() -> None:
    with pytest.raises(NoEligibleWorker, match="0 worker ranks are here"):
        route(request(), view(fleet_of()))


@EVERY_MODE
def test_a_pinned_rank_is_picked_or_refused(mode: RouterMode) -> None:
    fleet = fleet_of(worker(1, dp_size=3), worker(2))
    pinned = request(pin=Pin(WorkerId(1), DpRank(2)))
    assert route(pinned, view(fleet, mode=mode)).decode.rank == WorkerRank(WorkerId(1), DpRank(2))
    assert route(request(pin=Pin(WorkerId(1))), view(fleet, mode=mode)).decode.candidates == 3
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(pin=Pin(WorkerId(1), DpRank(3))), view(fleet, mode=mode))
    assert refused.value.refusals == {Reason.PINNED_ELSEWHERE: 4}


@EVERY_MODE
def test_an_ineligible_pinned_worker_is_refused(mode: RouterMode) -> None:
    fleet = fleet_of(worker(1), worker(2, "gpu"))
    with pytest.raises(NoEligibleWorker, match="pinned to 1"):
        route(request("gpu", pin=Pin(WorkerId(1))), view(fleet, mode=mode))


def test_a_pin_to_an_unknown_worker_is_reported() -> None:
    with pytest.raises(NoEligibleWorker, match="pinned to 9, which is not here"):
        route(request(pin=Pin(WorkerId(9))), view(fleet_of(worker(1))))


def test_a_prefill_pin_without_prefill_workers_is_refused() -> None:
    with pytest.raises(NoEligibleWorker, match="none of them for prefill") as refused:
        route(request(prefill_pin=Pin(WorkerId(1))), view(fleet_of(worker(1))))
    assert refused.value.role == "prefill"


def test_an_excluded_worker_is_passed_over() -> None:
    fleet = fleet_of(worker(1), worker(2))
    assert route(request(excluded=(1,)), view(fleet)).decode.rank.worker_id == 2


@EVERY_MODE
def test_a_worker_is_busy_above_the_fraction_of_its_blocks(mode: RouterMode) -> None:
    fleet = fleet_of(worker(1), worker(2))
    fleet.report(LoadReport(WorkerRank(WorkerId(1), DpRank(0)), active_blocks=30, total_blocks=100))
    assert route(request(), view(fleet, mode=mode, fraction=0.29, active=29)).decode.rank.worker_id == 2
    with pytest.raises(
        AllWorkersBusy, match="every decode worker that may take this request is busy"
    ) as busy:
        route(request(), view(fleet, mode=mode, fraction=0.29, active=30))
    assert busy.value.refusals == {Reason.BUSY: 2}


def is_busy(fleet: Fleet, *, booked: int, at_report: int | None) -> bool:
    """Whether the one worker, with so many blocks and tokens booked there, has more than 50 of either."""
    column = None if at_report is None else np.full(fleet.n_slots, at_report, np.int64)
    by_blocks = replace(view(fleet, fraction=0.5, active=booked), blocks_at_report=column)
    by_tokens = replace(view(fleet, tokens=50, prefill_tokens=booked), tokens_at_report=column)
    found = []
    for each in (by_blocks, by_tokens):
        try:
            route(request(), each)
        except AllWorkersBusy:
            found.append(True)
        else:
            found.append(False)
    assert found[0] == found[1]
    return found[0]


def test_busy_load_is_report_plus_later_bookings_or_all_bookings() -> None:
    fleet = fleet_of(worker(1))
    assert is_busy(fleet, booked=51, at_report=0)
    rank = WorkerRank(WorkerId(1), DpRank(0))

    def busy(reported: int, *, booked: int, at_report: int | None) -> bool:
        fleet.report(LoadReport(rank, reported, 100, active_prefill_tokens=reported))
        return is_busy(fleet, booked=booked, at_report=at_report)

    assert busy(51, booked=0, at_report=0), "somebody else's load"
    assert not busy(50, booked=10, at_report=10), "what is in the report counts once"
    assert busy(50, booked=11, at_report=10), "one more was booked since"
    assert not busy(60, booked=0, at_report=10), "ten ended since"
    assert busy(61, booked=0, at_report=10)
    assert busy(0, booked=51, at_report=51), "all that is booked will be there, whatever the engine says"
    assert not busy(50, booked=50, at_report=None)
    assert busy(50, booked=51, at_report=None)


def test_a_worker_is_busy_above_the_prefill_token_threshold() -> None:
    fleet = fleet_of(worker(1))
    assert route(request(), view(fleet, tokens=100, prefill_tokens=100)).decode.rank.worker_id == 1
    with pytest.raises(AllWorkersBusy):
        route(request(), view(fleet, tokens=100, prefill_tokens=101))


def test_busy_by_tokens_uses_the_ledger_when_engines_do_not_report_them() -> None:
    fleet = fleet_of(worker(1))
    report = LoadReport(WorkerRank(WorkerId(1), DpRank(0)), active_blocks=0, total_blocks=100)
    fleet.report(report)
    with pytest.raises(AllWorkersBusy):
        route(request(), view(fleet, tokens=100, prefill_tokens=101))
    fleet.report(replace(report, active_prefill_tokens=101))
    with pytest.raises(AllWorkersBusy):
        route(request(), view(fleet, tokens=100))


def test_no_rank_is_busy_without_a_threshold_or_known_blocks() -> None:
    assert route(request(), view(fleet_of(worker(1)), active=10**9)).decode.candidates == 1
    blank = WorkerCard(WorkerId(1), Epoch(1), ModelName("m"), Role.BOTH, 4, 4096, "here")
    assert route(request(), view(fleet_of(blank), fraction=0.0, active=10**9)).decode.candidates == 1


def test_no_eligible_worker_wins_over_busy() -> None:
    fleet = fleet_of(worker(1), worker(2))
    with pytest.raises(NoEligibleWorker):
        route(request("gpu"), view(fleet, fraction=0.1, active=90))


def test_busy_ranks_are_counted_with_the_other_reasons() -> None:
    fleet = fleet_of(worker(1, "gpu"), worker(2))
    with pytest.raises(AllWorkersBusy) as refused:
        route(request("gpu"), view(fleet, fraction=0.1, active=90))
    assert refused.value.refusals == {Reason.TAINT_MISSING: 1, Reason.BUSY: 1}


def test_explain_names_each_refused_rank() -> None:
    fleet = fleet_of(worker(3), worker(1, "gpu"), worker(2, draining=True))
    decision = route(request("gpu"), view(fleet), explain=True)
    rows = {row.rank.worker_id: (row.refused, row.picked) for row in decision.rows}
    assert rows == {1: (None, True), 2: (Reason.DRAINING, False), 3: (Reason.TAINT_MISSING, False)}
    assert [row.rank.worker_id for row in decision.rows] == [1, 2, 3]


def rows_of(refused: RoutingRefused) -> list[Candidate]:
    rows = [row for row in refused.rows if isinstance(row, Candidate)]
    assert len(rows) == len(refused.rows)
    assert not any(row.picked for row in rows)
    return rows


def test_explained_refusals_show_each_ranks_first_reason_and_cost() -> None:
    fleet = fleet_of(worker(3), worker(1, "gpu", dp_size=2), worker(2, draining=True))
    reading = view(fleet, fraction=0.5, active=90, prefill_tokens=4)
    with pytest.raises(AllWorkersBusy) as refused:
        route(request("gpu"), reading, explain=True)
    rows = rows_of(refused.value)
    assert [(row.rank.worker_id, row.rank.dp_rank, row.refused) for row in rows] == [
        (1, 0, Reason.BUSY),
        (1, 1, Reason.BUSY),
        (2, 0, Reason.DRAINING),
        (3, 0, Reason.TAINT_MISSING),
    ]
    assert {row.leg for row in rows} == {Leg.AGGREGATED}
    assert {(row.prefill_blocks, row.decode_blocks, row.cost) for row in rows} == {(3.0, 92.0, 95.0)}


def test_explained_refusals_without_a_rank_of_the_role_show_all_ranks() -> None:
    fleet = fleet_of(worker(2), worker(1))
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(prefill_pin=Pin(WorkerId(1))), view(fleet), explain=True)
    assert [(row.leg, row.rank.worker_id, row.refused) for row in rows_of(refused.value)] == [
        (Leg.PREFILL, 1, Reason.WRONG_ROLE),
        (Leg.PREFILL, 2, Reason.WRONG_ROLE),
        (Leg.DECODE, 1, None),
        (Leg.DECODE, 2, None),
    ]


def test_an_explained_refusal_of_an_empty_fleet_has_no_rows() -> None:
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(), view(fleet_of()), explain=True)
    assert refused.value.rows == ()


def test_a_refusal_computes_no_rows_without_explain(make_fail: MakeFail) -> None:
    for name in ("leg_costs", "rows_of"):
        make_fail(explain, name, AssertionError("a cost that nobody asked for"))
    for fleet in (fleet_of(worker(1)), fleet_of(worker(1, role=Role.PREFILL), worker(2, role=Role.DECODE))):
        with pytest.raises(NoEligibleWorker) as refused:
            route(request("gpu"), view(fleet))
        assert refused.value.rows == ()
