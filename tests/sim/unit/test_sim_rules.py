"""The published rules: each formula on numbers that one can check by hand."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from msgspec import structs

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import RequestId, Slot
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.costs.leg import leg_costs
from kvrouter.kernel.routing.interface import PickInput, RouteRequest, RoutingSettings, View
from kvrouter.sim.replay.sim_fleet import SlotLoads
from kvrouter.sim.rules.registry import GRID_MAX, RULES, parse_rule
from kvrouter.sim.rules.rule import PublishedRule
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card


class Asked(NamedTuple):
    request: RouteRequest
    view: View
    leg: Leg
    loads: SlotLoads
    draw: int


def asked(
    *,
    overlap: list[int] | None = None,
    prefill_tokens: list[int] | None = None,
    active: list[int] | None = None,
    in_flight: list[int] | None = None,
    waiting: list[int] | None = None,
    kv_use: list[float] | None = None,
    isl_blocks: int = 10,
    leg: Leg = Leg.AGGREGATED,
    session: str = "",
    draw: int = 0,
    timings: Sequence[Timing] = (Timing(),) * 3,
) -> Asked:
    """One leg over three workers; what is not given is 0."""
    fleet = Fleet(MODEL, BLOCK_SIZE)
    for worker in (1, 2, 3):
        fleet.join(card(worker))
    nothing = [0, 0, 0]
    loads = SlotLoads()
    for slot, timing in enumerate(timings):
        loads.joined(Slot(slot), timing)
    loads.in_flight[:3] = in_flight or nothing
    loads.waiting[:3] = waiting or nothing
    loads.kv_use[:3] = kv_use or nothing
    view = View(
        fleet=fleet,
        settings=RoutingSettings(),
        overlap_blocks=np.array(overlap or nothing, np.uint32),
        prefill_tokens=np.array(prefill_tokens or nothing, np.int64),
        active_blocks=np.array(active or nothing, np.int64),
        not_active=None,
    )
    request = RouteRequest(
        request_id=RequestId("r"), isl_tokens=isl_blocks * BLOCK_SIZE, total_blocks=isl_blocks
    )
    loads.session_of = lambda _request_id: session
    return Asked(request, view, leg, loads, draw)


def picked(rule: PublishedRule, given: Asked) -> Slot:
    """The slot that a rule costs and picks, as a decision asks it."""
    rule.gateway = given.loads
    cost = leg_costs(given.request, structs.replace(given.view, rule=rule), given.leg, 1.0).cost
    return rule.pick(cost, PickInput(given.request, given.leg, np.array([0, 1, 2]), given.draw))


def test_round_robin_takes_workers_in_turn_for_each_leg() -> None:
    rule = parse_rule("round-robin")
    assert [picked(rule, asked()) for _ in range(4)] == [0, 1, 2, 0]
    assert picked(rule, asked(leg=Leg.DECODE)) == 0


def test_least_loaded_and_power_of_two_take_fewer_requests() -> None:
    assert picked(parse_rule("least-loaded"), asked(in_flight=[4, 2, 3])) == 1
    picks = {picked(parse_rule("power-of-two"), asked(in_flight=[1, 2, 9], draw=draw)) for draw in range(40)}
    assert picks == {Slot(0), Slot(1)}


def test_dynamo_cost_adds_prefill_and_decode_blocks() -> None:
    # worker 0: 4 + 8 queued + 0 active; worker 1: 10 + 0 + 5; worker 2: 10 + 0 + 0
    given = asked(overlap=[6, 0, 0], prefill_tokens=[8 * BLOCK_SIZE, 0, 0], active=[0, 5, 0])
    assert picked(parse_rule("dynamo"), given) == 2
    assert picked(parse_rule("dynamo"), asked(overlap=[6, 0, 0], active=[5, 5, 0])) == 0
    assert picked(parse_rule("dynamo:overlap_weight=4"), asked(overlap=[6, 0, 0], active=[20, 5, 0])) == 0
    decode = asked(overlap=[10, 0, 0], active=[3, 2, 9], leg=Leg.DECODE)
    assert picked(parse_rule("dynamo"), decode) == 1
    warm = {
        picked(parse_rule("dynamo:temperature=2"), asked(overlap=[6, 0, 0], draw=draw << 60))
        for draw in range(16)
    }
    assert len(warm) > 1


def test_lmetric_cost_is_new_prefill_tokens_times_the_batch() -> None:
    assert picked(parse_rule("lmetric"), asked(overlap=[8, 0, 0], in_flight=[3, 0, 1])) == 0
    assert picked(parse_rule("lmetric"), asked(overlap=[8, 0, 0], in_flight=[5, 0, 1])) == 1
    queued = asked(overlap=[8, 0, 0], prefill_tokens=[9 * BLOCK_SIZE, 0, 0], in_flight=[0, 0, 1])
    assert picked(parse_rule("lmetric"), queued) == 1
    assert picked(parse_rule("lmetric"), asked(in_flight=[5, 2, 1], leg=Leg.DECODE)) == 2


def test_predicted_ttft_counts_own_prefill_and_the_queue() -> None:
    rule = parse_rule("predicted-ttft")
    assert picked(rule, asked(overlap=[9, 0, 0], isl_blocks=1_000, active=[99, 0, 0])) == 0
    assert picked(rule, asked(overlap=[9, 0, 0], prefill_tokens=[100_000, 0, 0], active=[0, 3, 1])) == 2


def test_predicted_ttft_uses_the_timing_of_each_engine() -> None:
    rule = parse_rule("predicted-ttft")
    fast = Timing(prefill_quadratic=0.0, prefill_linear=0.001, prefill_base=1.0)
    # a prompt of 160 tokens takes 18.9 ms by the default timing, and 1.2 ms on the fast engine
    assert picked(rule, asked(timings=(Timing(), fast, Timing()), active=[0, 9, 0])) == 1
    # a queued token takes 0.017 ms, there 0.017 · 9.192 / 169.14 ms: 18,000 take 16.6 ms, 20,500 take 18.9 ms
    for queued, least in ((18_000, 1), (20_500, 0)):
        given = asked(timings=(Timing(), fast, Timing()), active=[0, 9, 1], prefill_tokens=[0, queued, 0])
        assert picked(rule, given) == least
    attending = Timing(prefill_attention=1e-4)
    assert picked(rule, asked(timings=(attending, attending, Timing()), active=[0, 0, 9])) == 2


def test_llm_d_rule_adds_weighted_scores() -> None:
    rule = parse_rule("llm-d")
    # 2 · (1, 0, 1) + 2 · (0.1, 1, 0.9) + 3 · (1, 0, 0.2)
    given = asked(overlap=[10, 0, 2], waiting=[0, 4, 0], kv_use=[0.9, 0.0, 0.1])
    assert picked(rule, given) == 0
    assert picked(parse_rule("llm-d:prefix=0"), given) == 2


def test_aibrix_takes_the_longest_prefix_that_is_not_overloaded() -> None:
    rule = parse_rule("aibrix")
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[2, 3, 3])) == 1
    assert picked(rule, asked(in_flight=[2, 3, 1])) == 2
    # the mean is 5, the deviation 2.94: the longest match is over both, then the next one is taken
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[2, 9, 4])) == 0
    assert picked(parse_rule("aibrix:deviations=2"), asked(overlap=[4, 8, 0], in_flight=[2, 9, 4])) == 1


def test_aibrix_takes_least_loaded_workers_while_load_is_uneven() -> None:
    rule = parse_rule("aibrix:deviations=2")
    # 30 is over 2 · ((1 + 1) / 2 + 1), and 29 more than the fewest: of the two others the match is taken
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[1, 30, 1], draw=1)) == 0
    assert picked(rule, asked(overlap=[0, 8, 0], in_flight=[2, 30, 1])) == 2
    # 8 more than the fewest, and just 2 · ((0 + 6) / 2 + 1): not uneven
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[0, 8, 6])) == 1
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[0, 9, 6])) == 0
    assert (
        picked(parse_rule("aibrix:deviations=2,factor=3"), asked(overlap=[4, 8, 0], in_flight=[0, 9, 6])) == 1
    )
    assert (
        picked(parse_rule("aibrix:deviations=2,imbalance=10"), asked(overlap=[4, 8, 0], in_flight=[0, 9, 6]))
        == 1
    )


def test_aibrix_compares_prefixes_in_whole_percent() -> None:
    given = asked(overlap=[801, 802, 0], in_flight=[1, 2, 2], isl_blocks=1_000)
    assert picked(parse_rule("aibrix"), given) == 0


def test_sglang_takes_the_longest_prefix_while_load_is_balanced() -> None:
    rule = parse_rule("sglang")
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[2, 60, 1])) == 1
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[2, 66, 1])) == 2
    assert picked(rule, asked(overlap=[4, 8, 0], in_flight=[100, 140, 101])) == 1
    assert picked(rule, asked(overlap=[0, 3, 0], in_flight=[2, 3, 1])) == 2
    assert picked(parse_rule("sglang:cache=0.2"), asked(overlap=[0, 3, 0], in_flight=[2, 3, 1])) == 1


def test_sticky_session_stays_until_its_worker_has_twice_the_average() -> None:
    rule = parse_rule("sticky")
    assert picked(rule, asked(in_flight=[1, 0, 1], session="s")) == 1
    assert picked(rule, asked(in_flight=[1, 3, 1], session="s")) == 1
    assert picked(rule, asked(in_flight=[1, 9, 0], session="s")) == 2
    assert picked(rule, asked(in_flight=[1, 0, 2], session="s")) == 2
    assert picked(rule, asked(in_flight=[0, 1, 1])) == 0


def test_sticky_session_stays_up_to_the_floor_of_requests() -> None:
    for policy, stays in (("sticky", False), ("sticky:floor=1", True)):
        rule = parse_rule(policy)
        assert picked(rule, asked(in_flight=[1, 0, 1], session="s")) == 1
        assert (picked(rule, asked(in_flight=[0, 1, 0], session="s")) == 1) is stays


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_source_and_a_grid_with_its_published_values(name: str) -> None:
    known = RULES[name]
    assert parse_rule(name).source
    assert len(known.grid) <= GRID_MAX
    assert not known.parameters or dict(known.parameters) in [dict(point) for point in known.grid]
    for point in known.grid:
        parse_rule(f"{name}:{','.join(f'{key}={value}' for key, value in point.items())}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lmetrik", r"'lmetrik' is none of kvrouter, round-robin.*did you mean lmetric"),
        ("dynamo:weight=1", "no parameter 'weight'; it has overlap_weight, temperature"),
        ("random:x=1", "it has none"),
        ("sticky:escape=nan", "'nan' is not a number of 0 or more"),
        ("sticky:escape=-1", "'-1' is not"),
        ("sticky:escape=", "'' is not"),
    ],
)
def test_unknown_rule_or_parameter_is_refused_with_a_suggestion(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse_rule(text)
    assert refused.value.param == "policy"
