"""What an explanation shows of both legs when no pair can be formed."""

import numpy as np
import pytest

from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Candidate, RouteRequest, RoutingSettings, View, route, route_decode
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.kernel.topology.policy import Fallback, Required, TransferConstraint
from tests.testing.plain_fleets import idle_view, worker_card

REQUEST = RouteRequest(RequestId("r"), 8, 2)
MISMATCH, BUSY = Reason.DOMAIN_MISMATCH, Reason.BUSY


def worker(worker_id: int, role: Role, zone: str | None) -> WorkerCard:
    prefill = role is Role.PREFILL
    config = ModelRuntimeConfig(
        topology_domains={} if zone is None else {"zone": zone},
        topology_levels=("zone",),
        kv_transfer_domain="zone" if prefill else None,
        kv_transfer_enforcement=Enforcement.REQUIRED if prefill else None,
        kv_bytes_per_token=1000,
        total_kv_blocks=100,
    )
    return worker_card(worker_id, role, config)


def fleet_of(*, prefill: str, decode: str) -> Fleet:
    """Prefill workers 1, 2, … and decode workers 11, 12, …, one in each of the zones."""
    fleet = Fleet(ModelName("m"), 4)
    for first, role, zones in ((1, Role.PREFILL, prefill), (11, Role.DECODE, decode)):
        for worker_id, zone in enumerate(zones, first):
            fleet.join(worker(worker_id, role, zone if zone != "-" else None))
    return fleet


def view(fleet: Fleet, *busy: int, settings: RoutingSettings | None = None) -> View:
    active = np.zeros(fleet.n_slots, np.int64)
    for worker_id in busy:
        active[list(fleet.slots_of(WorkerId(worker_id)))] = 90
    chosen = settings or RoutingSettings(active_decode_blocks_threshold=0.5)
    return idle_view(fleet, chosen, active_blocks=active)


def rows_of(refused: RoutingRefused) -> list[Candidate]:
    return [row for row in refused.rows if isinstance(row, Candidate)]


def reasons_of(refused: RoutingRefused) -> dict[int, Reason | None]:
    return {row.rank.worker_id: row.refused for row in rows_of(refused)}


def refused_route(reading: View) -> RoutingRefused:
    with pytest.raises((NoEligibleWorker, AllWorkersBusy)) as refused:
        route(REQUEST, reading, explain=True)
    return refused.value


def test_explain_shows_the_domain_reason_on_both_legs_without_a_pair() -> None:
    refused = refused_route(view(fleet_of(prefill="a-", decode="b-")))
    assert reasons_of(refused) == {
        1: MISMATCH,
        2: Reason.DOMAIN_UNKNOWN,
        11: MISMATCH,
        12: Reason.DOMAIN_UNKNOWN,
    }
    assert [row.leg for row in rows_of(refused)] == [Leg.PREFILL] * 2 + [Leg.DECODE] * 2


def test_a_prefill_rank_stays_open_if_only_its_decode_ranks_are_busy() -> None:
    refused = refused_route(view(fleet_of(prefill="abc", decode="ab"), 2, 11, 12))
    assert (refused.role, refused.refusals) == ("decode", {BUSY: 2})
    assert reasons_of(refused) == {1: None, 2: BUSY, 3: MISMATCH, 11: BUSY, 12: BUSY}


def test_prefill_ranks_with_busy_decode_ranks_count_as_busy() -> None:
    refused = refused_route(view(fleet_of(prefill="ab", decode="ab"), 1, 12))
    assert (refused.role, refused.refusals) == ("prefill", {BUSY: 2})
    rows: dict[int, Candidate] = {row.rank.worker_id: row for row in rows_of(refused)}
    assert reasons_of(refused) == {1: BUSY, 2: BUSY, 11: None, 12: BUSY}
    assert (rows[1].prefill_blocks, rows[1].decode_blocks) == (2.0, 0.0)
    assert (rows[12].prefill_blocks, rows[12].decode_blocks) == (0.0, 92.0)


def test_a_fleet_without_decode_workers_is_not_a_domain_mismatch() -> None:
    refused = refused_route(view(fleet_of(prefill="a", decode="")))
    assert (refused.role, refused.refusals) == ("decode", {Reason.WRONG_ROLE: 1})
    assert [(row.leg, row.refused) for row in rows_of(refused)] == [
        (Leg.PREFILL, None),
        (Leg.DECODE, Reason.WRONG_ROLE),
    ]


def test_a_refused_second_decode_pick_explains_the_costs_of_transfers() -> None:
    links = LinkTable(otherwise=Link(2.0, 1e3), by_level={"zone": Link(0.5, 1e6)}, pairs={})
    settings = RoutingSettings(active_decode_blocks_threshold=0.5, kv_transfer_weight=1.0, links=links)
    fleet = fleet_of(prefill="a", decode="ab")
    with pytest.raises(AllWorkersBusy) as refused:
        route_decode(
            REQUEST,
            view(fleet, 11, settings=settings),
            TransferConstraint(Required("zone"), "a"),
            prefill=WorkerRank(WorkerId(1), DpRank(0)),
            explain=True,
        )
    assert refused.value.refusals == {BUSY: 1, MISMATCH: 1}
    assert reasons_of(refused.value) == {11: BUSY, 12: MISMATCH}
    assert [row.transfer_blocks for row in rows_of(refused.value)] == [0.508, 10.0]


def test_fallback_counts_busy_decode_ranks_outside_the_domain_as_busy() -> None:
    with pytest.raises(AllWorkersBusy) as refused:
        route_decode(
            REQUEST,
            view(fleet_of(prefill="a", decode="ab"), 11, 12),
            TransferConstraint(Fallback("zone"), "a"),
            explain=True,
        )
    assert refused.value.refusals == {BUSY: 2}
    assert reasons_of(refused.value) == {11: BUSY, 12: BUSY}
