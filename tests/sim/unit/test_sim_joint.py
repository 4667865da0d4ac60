"""Replays in which pairs are chosen together, over links that are learned."""

from random import Random

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.dispatch import ByTimeStamp
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.replay.timetable import LinkEvent, PolicyEvent, TimetableEvent
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.replays import PIECE_TOKENS, by_number, fleet, replayed, row

JOINT = "router: {router_cost: time, router_pd_selection: joint}\n"
SEQUENTIAL = "router: {router_cost: time}\n"
ZONES = """topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0001, bandwidth_bytes_per_s: 5.0e+9}}
    across: {latency_s: 0.0001, bandwidth_bytes_per_s: 5.0e+9, price_per_gb: 0.02}
workers:
- {name: pa, role: prefill, replicas: 2, domains: {zone: a}}
- {name: da, role: decode, replicas: 2, domains: {zone: a}}
- {name: pb, role: prefill, replicas: 2, domains: {zone: b}}
- {name: db, role: decode, replicas: 2, domains: {zone: b}}
"""


def traffic(n: int, *, per_s: float) -> list[TraceRequest]:
    """Short prompts and long ones, of a few prefixes."""
    rng, at_s, rows = Random(3), 0.0, []
    for number in range(n):
        at_s += rng.expovariate(per_s)
        shared = [rng.randrange(8) * 1000 + piece for piece in range(rng.randrange(2, 30))]
        own = [10**6 + number * 1000 + piece for piece in range(rng.choice((1, 5, 150)))]
        rows.append(row(number, at_s, shared + own, output_tokens=rng.randrange(20, 120)))
    return rows


def simulated(
    file: FleetFile, rows: list[TraceRequest], timetable: tuple[TimetableEvent, ...] = ()
) -> tuple[Simulation, RecordedPlacementEvents]:
    simulation = Simulation(
        file,
        rows,
        config=file.router,
        dispatch=ByTimeStamp(),
        piece_tokens=PIECE_TOKENS,
        seed=1,
        timetable=timetable,
    )
    events = RecordedPlacementEvents()
    simulation.fleet.placer.transfers.learned.events = events
    simulation.run()
    return simulation, events


def mean_ttft_s(simulation: Simulation) -> float:
    times = [outcome.ttft_s for outcome in simulation.result.outcomes if outcome.ttft_s is not None]
    return sum(times) / len(times)


def test_joint_choice_keeps_short_prompts_local_and_lowers_mean_ttft() -> None:
    rows, fast = traffic(500, per_s=40.0), ZONES.replace("5.0e+9", "1.0e+11")
    outcomes = by_number(replayed(rows, fleet(JOINT + fast)))
    assert all(outcome.error == "" for outcome in outcomes)
    local = [outcome for outcome in outcomes if outcome.prefill is None]
    assert 20 < len(local) < 450
    mean_tokens = [
        sum(outcome.input_tokens - (outcome.cached_tokens or 0) for outcome in some) / len(some)
        for some in (local, [outcome for outcome in outcomes if outcome.prefill is not None])
    ]
    assert mean_tokens[0] < mean_tokens[1]
    together, _ = simulated(fleet(JOINT + fast), rows)
    apart, _ = simulated(fleet(SEQUENTIAL + fast), rows)
    assert mean_ttft_s(together) < 0.9 * mean_ttft_s(apart)


def test_replays_of_one_seed_are_equal() -> None:
    rows = traffic(200, per_s=25.0)
    one, other = (by_number(replayed(rows, fleet(JOINT + ZONES), seed=4)) for _ in range(2))
    assert [(each.prefill, each.decode, each.first_s) for each in one] == [
        (each.prefill, each.decode, each.first_s) for each in other
    ]


def test_joint_choice_keeps_kv_in_its_zone_where_required() -> None:
    policy = "kv_transfer: {domain: zone, enforcement: required}\n"
    for outcome in replayed(traffic(300, per_s=60.0), fleet(JOINT + policy + ZONES)).outcomes:
        assert outcome.error == ""
        zones = {"a" if worker <= 4 else "b" for worker in (outcome.prefill, outcome.decode) if worker}
        assert len(zones) == 1


def test_price_weight_reduces_transfers_over_priced_links() -> None:
    rows = traffic(300, per_s=30.0)

    def crossing(weight: float) -> int:
        router = f"router: {{router_cost: time, router_pd_selection: joint, router_price_weight: {weight}}}\n"
        outcomes = replayed(rows, fleet(router + ZONES)).outcomes
        return sum(
            outcome.prefill is not None and (outcome.prefill <= 4) != ((outcome.decode or 0) <= 4)
            for outcome in outcomes
        )

    assert crossing(0.0) > 10
    assert crossing(1000.0) <= crossing(0.0) / 10


@pytest.mark.parametrize("router", [JOINT, SEQUENTIAL])
def test_link_that_falls_during_a_replay_is_avoided_and_reported_slow(router: str) -> None:
    at_s = 20.0
    rows = traffic(900, per_s=18.0)
    fall = LinkEvent(at_s=at_s, between=("a", "a"), level="zone", bandwidth_factor=0.02)
    simulation, events = simulated(fleet(router + ZONES), rows, (fall,))
    assert ("zone=a to zone=a", True) in [(name, is_slow) for name, is_slow, _ in events.links]
    outcomes = by_number(simulation.result)
    assert all(outcome.error == "" for outcome in outcomes)
    moved = [0, 0]
    for outcome in outcomes:
        if outcome.prefill in (1, 2) and outcome.decode in (3, 4):
            moved[outcome.arrived_s > at_s + 5.0] += 1
    before_s, after_s = at_s, outcomes[-1].arrived_s - at_s - 5.0
    assert moved[1] / after_s < 0.25 * moved[0] / before_s
    unscathed, events = simulated(fleet(router + ZONES), rows)
    assert events.links == []
    assert unscathed.fleet.placer.transfers.learned.are_alike


def test_joint_choice_is_refused_with_a_cost_other_than_time() -> None:
    wrong = PolicyEvent(at_s=1.0, set={"router_pd_selection": "joint"})
    rows, blocks = traffic(60, per_s=30.0), "router: {router_cost: blocks}\n" + ZONES
    with pytest.raises(ConfigError, match=r"set\.router_pd_selection: .*joint compares times.*not blocks"):
        replayed(rows, fleet(blocks), timetable=[wrong])
    both = PolicyEvent(at_s=1.0, set={"router_pd_selection": "joint", "router_cost": "time"})
    outcomes = by_number(replayed(rows, fleet(blocks), timetable=[both]))
    assert any(outcome.prefill is None for outcome in outcomes)
    with pytest.raises(ConfigError, match="router_pd_selection: joint compares times") as wrong_file:
        replayed(rows, fleet("router: {router_pd_selection: joint, router_cost: blocks}\n" + ZONES))
    assert wrong_file.value.param == "router_pd_selection"


@pytest.mark.parametrize("router", [JOINT, SEQUENTIAL, "router: {}\n"])
def test_prompt_length_pools_and_transfer_policy_hold_together(router: str) -> None:
    pools = """topology: {levels: [zone]}
kv_transfer: {domain: zone, enforcement: required}
workers:
- {name: short-a, role: prefill, domains: {zone: a}, prompt_tokens: {max: 2048}}
- {name: long-a, role: prefill, domains: {zone: a}, prompt_tokens: {min: 2049}}
- {name: long-b, role: prefill, domains: {zone: b}, prompt_tokens: {min: 2049}}
- {name: decode-a, role: decode, domains: {zone: a}, prompt_tokens: {max: 500}}
- {name: decode-b, role: decode, domains: {zone: b}, prompt_tokens: {max: 500}}
"""
    outcomes = by_number(replayed(traffic(300, per_s=20.0), fleet(router + pools)))
    took = set()
    for outcome in outcomes:
        assert outcome.error == ""
        took.add(outcome.prefill)
        if outcome.prefill is None:
            assert outcome.input_tokens <= 500
        else:
            assert (outcome.prefill == 1) == (outcome.input_tokens <= 2048)
            assert (outcome.prefill == 3) == (outcome.decode == 5)
    assert {1, 2, 3} <= took
    assert (None in took) == (router == JOINT)
