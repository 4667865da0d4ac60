"""The cost of time is, at every rank, the sum that its formula says; the cheapest rank is picked."""

from enum import Enum, auto
from itertools import cycle
from math import inf
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.ids import Epoch, ModelName, RequestId, Slot, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.core.workers import ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import RouteRequest, RoutingSettings, View, route
from kvrouter.kernel.routing.interface import CostInput, Speeds, Times
from tests.oracles.prediction import RankLoad, predicted
from tests.testing.plain_fleets import worker_card

BLOCK = 16
NOW_S = 100.0
TIMINGS = (
    Timing(),
    Timing(prefill_attention=1e-6, decode_sequence=0.2, decode_kv_token=1e-5),
    Timing(prefill_quadratic=0.0, prefill_base=0.0, decode_quadratic=0.0, decode_linear=0.0, decode_base=9.0),
)
COUNT = st.integers(0, 3000)
LOADS = st.builds(
    RankLoad,
    overlap_blocks=st.integers(0, 40),
    not_active=st.integers(0, 40),
    prefill_tokens=st.integers(0, 40_000),
    active_blocks=COUNT,
    requests=st.integers(0, 40),
    waiting=st.integers(0, 20),
    total_blocks=st.sampled_from((64, 1000, None)).map(lambda blocks: blocks or inf),
    seats=st.sampled_from((4, 256, None)).map(lambda seats: seats or inf),
    slowness=st.floats(0.1, 20.0),
    decode_slowness=st.floats(0.1, 20.0),
    turnover=st.floats(0.0, 4.0),
    elapsed_s=st.floats(0.0, 20.0),
)


class Other(Enum):
    """A slot where no whole request is placed."""

    LEFT = auto()
    DEAD = auto()
    CIRCUIT_OPEN = auto()


def view_of(
    loads: list[RankLoad],
    settings: RoutingSettings,
    answer_s: float,
    *roles: Role,
    interference: float = 1.0,
) -> View:
    """Return a fleet whose workers have ``roles`` by turns."""
    fleet = Fleet(ModelName("m"), BLOCK)
    for (worker_id, load), role in zip(enumerate(loads, start=1), cycle(roles), strict=False):
        config = ModelRuntimeConfig(
            total_kv_blocks=None if load.total_blocks == inf else int(load.total_blocks),
            max_num_seqs=None if load.seats == inf else int(load.seats),
        )
        fleet.join(worker_card(worker_id, role, config, block_size=BLOCK))
    return View(
        fleet=fleet,
        settings=settings,
        overlap_blocks=np.array([load.overlap_blocks for load in loads], np.uint32),
        prefill_tokens=np.array([load.prefill_tokens for load in loads], np.int64),
        active_blocks=np.array([load.active_blocks for load in loads], np.int64),
        not_active=np.array([load.not_active for load in loads], np.uint32),
        cost_input=CostInput(
            np.array([load.requests for load in loads], np.int64),
            np.array([load.waiting for load in loads], np.int64),
            Speeds(
                np.array([load.slowness for load in loads]),
                np.array([load.decode_slowness for load in loads]),
                np.array([load.turnover for load in loads]),
                NOW_S - np.array([load.elapsed_s for load in loads]),
                NOW_S,
                answer_s,
                interference,
            ),
        ),
    )


def take_none(fleet: Fleet, others: list[Other]) -> None:
    """Make the first workers such ``others``."""
    for worker_id, other in enumerate(others, start=1):
        match other:
            case Other.LEFT:
                fleet.leave(WorkerId(worker_id), Epoch(1))
            case Other.DEAD:
                fleet.set_alive(WorkerId(worker_id), False)
            case Other.CIRCUIT_OPEN:
                fleet.set_circuit_open(WorkerId(worker_id), True)


def cost_of(times: Times) -> float:
    return sum(times)


@given(
    loads=st.lists(LOADS, min_size=1, max_size=6),
    others=st.lists(st.tuples(st.sampled_from(Other), LOADS), max_size=6),
    timing=st.sampled_from(TIMINGS),
    isl_tokens=st.integers(1, 50_000),
    answer_s=st.floats(0.0, 60.0),
    decode_weight=st.sampled_from((0.0, 1.0, 8.0)),
    interference=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_predicted_times_follow_the_formula_and_the_least_cost_is_picked(
    loads: list[RankLoad],
    others: list[tuple[Other, RankLoad]],
    timing: Timing,
    isl_tokens: int,
    answer_s: float,
    decode_weight: float,
    interference: float,
) -> None:
    """The fleet also has ``others``, which take no whole requests: what waits there is not in the mean."""
    settings = RoutingSettings(cost="time", timing=timing, decode_weight=decode_weight)
    of_slots = [load for _, load in others] + loads
    view = view_of(of_slots, settings, answer_s, Role.BOTH, interference=interference)
    take_none(view.fleet, [kind for kind, _ in others])
    decision = route(RouteRequest(RequestId("r"), isl_tokens, -(-isl_tokens // BLOCK)), view, explain=True)
    costs = []
    rows = {row.slot: row for row in decision.rows if row.refused is None}
    for slot, load in enumerate(loads, start=len(others)):
        row = rows.pop(Slot(slot))
        expected = predicted(
            load,
            timing,
            Leg.AGGREGATED,
            isl_tokens=isl_tokens,
            block_size=BLOCK,
            answer_s=answer_s,
            decode_weight=decode_weight,
            mean_waiting=fmean(each.waiting for each in loads),
            interference=interference,
        )
        assert row.times == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert row.times is not None
        assert row.cost == pytest.approx(cost_of(row.times), rel=1e-9, abs=1e-12)
        costs.append(row.cost)
        if decision.decode.slot == slot:
            assert decision.decode.times == row.times
    assert not rows
    assert decision.decode.cost == min(costs)


@pytest.mark.parametrize("waiting_there", [0, 20])
@pytest.mark.parametrize("other", Other)
def test_the_mean_of_waiting_is_over_ranks_that_take_new_requests(other: Other, waiting_there: int) -> None:
    def others_s(others: list[Other]) -> float:
        busy = RankLoad(0, 9, 0, 0, 2, 2, inf, inf, 1.0, 1.0, 0.0, 0.0)
        loads = [busy._replace(waiting=waiting_there)] * len(others) + [busy]
        view = view_of(loads, RoutingSettings(cost="time"), 4.0, Role.BOTH)
        take_none(view.fleet, others)
        times = route(RouteRequest(RequestId("r"), 9 * BLOCK, 9), view).decode.times
        assert times is not None
        return times.others_s

    assert others_s([other] * 3) == others_s([])


@given(load=LOADS, leg=st.sampled_from((Leg.PREFILL, Leg.DECODE)), isl_tokens=st.integers(1, 20_000))
def test_prefill_and_decode_legs_have_only_their_own_predicted_times(
    load: RankLoad, leg: Leg, isl_tokens: int
) -> None:
    settings = RoutingSettings(cost="time")
    view = view_of([load], settings, 4.0, Role.PREFILL if leg is Leg.PREFILL else Role.DECODE)
    other = Role.DECODE if leg is Leg.PREFILL else Role.PREFILL
    view.fleet.join(WorkerCard(WorkerId(99), Epoch(1), view.fleet.model, other, BLOCK, 100_000, "b"))
    both = [load, RankLoad(0, 0, 0, 0, 0, 0, inf, inf, 1.0, 1.0, 0.0, 0.0)]
    whole = view_of(both, settings, 4.0, Role.BOTH)
    view = View(
        **{
            name: getattr(view if name in ("fleet", "settings") else whole, name)
            for name in View.__struct_fields__
        }
    )
    decision = route(RouteRequest(RequestId("r"), isl_tokens, -(-isl_tokens // BLOCK)), view)
    pick = decision.prefill if leg is Leg.PREFILL else decision.decode
    assert pick is not None
    expected = predicted(
        load,
        settings.timing,
        leg,
        isl_tokens=isl_tokens,
        block_size=BLOCK,
        answer_s=4.0,
        decode_weight=settings.decode_weight,
    )
    assert pick.times == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(
    loads=st.lists(LOADS, min_size=2, max_size=8),
    roles=st.sampled_from(((Role.BOTH,), (Role.PREFILL, Role.DECODE))),
    excluded=st.frozensets(st.integers(3, 8).map(WorkerId)),
    isl_tokens=st.integers(1, 50_000),
)
def test_ineligible_ranks_are_neither_picked_nor_counted(
    loads: list[RankLoad], roles: tuple[Role, ...], excluded: frozenset[WorkerId], isl_tokens: int
) -> None:
    view = view_of(loads, RoutingSettings(cost="time"), 4.0, *roles)
    request = RouteRequest(RequestId("r"), isl_tokens, -(-isl_tokens // BLOCK), excluded=excluded)
    decision, explained = route(request, view), route(request, view, explain=True)
    assert structs.replace(explained, rows=()) == decision
    for pick in filter(None, (decision.prefill, decision.decode)):
        open_rows = [row for row in explained.rows if row.leg is pick.leg and row.refused is None]
        assert pick.cost == min(row.cost for row in open_rows)
        assert pick.rank.worker_id not in excluded
        assert pick.candidates == len(open_rows)
