"""Replays under the cost of time: what is predicted comes, and slow workers are noticed."""

from random import Random

import pytest

from kvrouter.core.cost_rules import COST_RULES
from kvrouter.core.ids import Slot
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.dispatch import ByTimeStamp
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.replay.timetable import PolicyEvent
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.replays import PIECE_TOKENS, TWO_ZONES, by_number, fleet, replayed, row

TIME = "router: {router_cost: time}\n"
BLOCKS = "router: {router_cost: blocks}\n"
EIGHT = "workers: [{name: w, replicas: 8, engine: {total_kv_blocks: 4096}}]"
HALF_SLOW = """workers:
- {name: fast, replicas: 2, engine: {total_kv_blocks: 4096}}
- {name: slow, replicas: 2, engine: {total_kv_blocks: 4096, timing: {
    prefill_quadratic: 1.26e-6, prefill_linear: 0.0456, prefill_base: 49.5,
    decode_quadratic: -77.2, decode_linear: 162.0, decode_base: 17.2}}}
"""


def traffic(n: int, *, per_s: float, seed: int = 5) -> list[TraceRequest]:
    """Requests of a few long prefixes, and of tails that nobody shares."""
    rng, at_s, rows = Random(seed), 0.0, []
    for number in range(n):
        at_s += rng.expovariate(per_s)
        prefix = rng.randrange(12)
        shared = [prefix * 1000 + piece for piece in range(rng.randrange(4, 60))]
        own = [1_000_000 + number * 100 + piece for piece in range(rng.randrange(1, 60))]
        rows.append(row(number, at_s, shared + own, output_tokens=rng.randrange(2, 80)))
    return rows


def simulated(file: FleetFile, rows: list[TraceRequest]) -> Simulation:
    simulation = Simulation(
        file, rows, config=file.router, dispatch=ByTimeStamp(), piece_tokens=PIECE_TOKENS, seed=1
    )
    simulation.run()
    return simulation


def mean_ttft_s(file: FleetFile, rows: list[TraceRequest]) -> float:
    times = [outcome.ttft_s for outcome in replayed(rows, file).outcomes]
    assert None not in times
    return sum(filter(None, times)) / len(times)


def test_time_cost_answers_sooner_than_block_cost_and_is_repeatable() -> None:
    rows = traffic(600, per_s=60.0)
    by_time = mean_ttft_s(fleet(TIME + EIGHT), rows)
    assert by_time < 0.95 * mean_ttft_s(fleet(BLOCKS + EIGHT), rows)
    assert by_time == mean_ttft_s(fleet(TIME + EIGHT), rows)


def test_slow_workers_are_learned_and_get_fewer_requests() -> None:
    rows = traffic(600, per_s=20.0)
    simulation = simulated(fleet(TIME + HALF_SLOW), rows)
    readings = [simulation.fleet.placer.speeds.reading(Slot(slot)) for slot in range(4)]
    slowness = [reading.slowness for reading in readings if reading is not None]
    assert slowness == pytest.approx([1.0, 1.0, 3.0, 3.0], rel=0.25)
    assert [reading.is_slow for reading in readings if reading is not None] == [False, False, True, True]
    taken = [0, 0]
    for outcome in simulation.result.outcomes:
        taken[(outcome.decode or 0) > 2] += 1
    assert taken[0] > 2 * taken[1]


def test_predicted_times_agree_with_the_seen_times() -> None:
    simulation = simulated(fleet(TIME + EIGHT), traffic(400, per_s=20.0))
    for slot in range(8):
        reading = simulation.fleet.placer.speeds.reading(Slot(slot))
        assert reading is not None
        assert reading.predicted_s == pytest.approx(reading.seen_s, rel=0.25, abs=0.02)


def test_time_cost_seldom_chooses_pairs_that_cross_zones() -> None:
    outcomes = by_number(replayed(traffic(40, per_s=0.02), fleet(TIME + TWO_ZONES)))
    assert all(outcome.error == "" for outcome in outcomes)
    assert all(outcome.prefill is not None for outcome in outcomes)
    crossing = [outcome for outcome in outcomes if outcome.decode != (outcome.prefill or 0) + 1]
    assert len(crossing) < len(outcomes) / 10


def test_time_cost_avoids_a_shared_link_and_lowers_mean_ttft() -> None:
    """Two decode workers in the zone share its link; the far one has a link that is half as fast and free."""
    shared = """topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0, bandwidth_bytes_per_s: 4.0e+9}}
    across: {latency_s: 0.0, bandwidth_bytes_per_s: 2.0e+9}
workers:
- {name: pa, role: prefill, replicas: 8, domains: {zone: a}}
- {name: da, role: decode, replicas: 2, domains: {zone: a}}
- {name: db, role: decode, domains: {zone: b}}
"""
    rows = traffic(300, per_s=10.0)
    by_time = mean_ttft_s(fleet(TIME + shared), rows)
    alone = mean_ttft_s(fleet("router: {kv_transfer_weight: 3000}\n" + shared), rows)
    assert by_time < 0.8 * alone


def test_router_cost_may_be_switched_during_a_replay() -> None:
    file, rows = fleet(BLOCKS + EIGHT), traffic(300, per_s=60.0)
    switch = PolicyEvent(at_s=rows[150].at_s, set={"router_cost": "time"})
    switched = replayed(rows, file, timetable=[switch])
    before = [outcome for outcome in by_number(replayed(rows, file)) if outcome.number < 150]
    assert [o.decode for o in by_number(switched) if o.number < 150] == [o.decode for o in before]
    assert [o.decode for o in by_number(switched)] != [o.decode for o in by_number(replayed(rows, file))]


@pytest.mark.parametrize("cost", [*COST_RULES])
def test_every_cost_serves_all_requests_where_memory_is_short(cost: str) -> None:
    small = "workers: [{name: w, replicas: 2, engine: {total_kv_blocks: 300}}]"
    outcomes = replayed(
        traffic(120, per_s=200.0), fleet(f"router: {{router_cost: {cost}}}\n{small}")
    ).outcomes
    assert len(outcomes) == 120
    assert all(outcome.error == "" for outcome in outcomes)
