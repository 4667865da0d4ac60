from collections import Counter
from collections.abc import Sequence
from math import exp, tanh

import msgspec
import numpy as np
import pytest

from kvrouter.core.constraints import Pin, RouterConfigOverride, RouterMode, RoutingConstraints
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import RequestId, Taint, WorkerId, WorkerRank
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, RouteRequest, RoutingSettings, View, route
from kvrouter.kernel.topology.link_table import Link, LinkTable
from tests.testing.plain_fleets import fleet_of, idle_view, worker_card

BLOCK = 4


def fleet_with(configs: Sequence[tuple[Role, ModelRuntimeConfig]]) -> Fleet:
    return fleet_of(*(worker_card(number, *each) for number, each in enumerate(configs, start=1)))


def alike(count: int, *taints: str) -> Fleet:
    return fleet_with([(Role.BOTH, ModelRuntimeConfig(taints=frozenset(map(Taint, taints))))] * count)


def view(
    fleet: Fleet,
    *,
    overlap: Sequence[int] | None = None,
    prefill_tokens: Sequence[int] | None = None,
    active: Sequence[int] | None = None,
    fresh: Sequence[int] | None = None,
    settings: RoutingSettings = RoutingSettings(),  # noqa: B008
    seed: int = 0,
    turn: int = 0,
) -> View:
    nothing = [0] * fleet.n_slots
    return idle_view(
        fleet,
        settings,
        overlap_blocks=None if overlap is None else np.array(overlap, np.uint32),
        prefill_tokens=np.array(prefill_tokens or nothing, np.int64),
        active_blocks=np.array(active or nothing, np.uint32),
        not_active=None if fresh is None else np.array(fresh, np.uint32),
        seed=seed,
        turn=turn,
    )


def request(
    request_id: str = "r",
    isl_tokens: int = 40,
    *,
    constraints: RoutingConstraints = RoutingConstraints(),  # noqa: B008
    override: RouterConfigOverride = RouterConfigOverride(),  # noqa: B008
    pin: Pin | None = None,
) -> RouteRequest:
    return RouteRequest(
        RequestId(request_id), isl_tokens, -(-isl_tokens // BLOCK), constraints, override, pin
    )


def prefer(**weights: float) -> RoutingConstraints:
    return RoutingConstraints(preferred_taints={Taint(name): weight for name, weight in weights.items()})


def test_the_specifications_example_goes_to_worker_2() -> None:
    # 10 blocks asked; 2, 5 and 8 cached: 8, 5 and 2 to prefill; 10, 5 and 9 decode blocks.
    reading = view(alike(3), overlap=[2, 5, 8], active=[10, 5, 9], fresh=[0, 0, 0])
    decision = route(request(), reading, explain=True)
    assert [row.cost for row in decision.rows] == [18.0, 10.0, 11.0]
    assert decision.decode.rank.worker_id == 2
    assert (decision.decode.prefill_blocks, decision.decode.decode_blocks) == (5.0, 5.0)
    assert (decision.decode.overlap_blocks, decision.decode.candidates) == (5, 3)
    assert decision.prefill is None


@pytest.mark.parametrize(("weight", "worker_id"), [(0.0, 2), (1.0, 2), (2.0, 3)])
def test_the_weight_multiplies_prefill_blocks(weight: float, worker_id: int) -> None:
    reading = view(alike(3), overlap=[2, 5, 8], active=[10, 5, 9], fresh=[0, 0, 0])
    asked = request(override=RouterConfigOverride(overlap_score_weight=weight))
    assert route(asked, reading).decode.rank.worker_id == worker_id


def test_tokens_in_prefill_and_the_partial_tail_count() -> None:
    reading = view(alike(1), prefill_tokens=[6], active=[3], overlap=[2])
    pick = route(request(isl_tokens=11), reading).decode
    assert pick.prefill_blocks == (6 + 11 - 8) / BLOCK
    assert pick.decode_blocks == 3 + 3


def test_overlap_beyond_the_prompt_gives_no_credit() -> None:
    pick = route(request(isl_tokens=8), view(alike(1), prefill_tokens=[4], overlap=[9])).decode
    assert pick.prefill_blocks == 1.0


def test_untracked_load_costs_nothing() -> None:
    reading = view(
        alike(1),
        prefill_tokens=[6],
        active=[3],
        settings=RoutingSettings(track_active_blocks=False, track_prefill_tokens=False),
    )
    pick = route(request(), reading).decode
    assert (pick.prefill_blocks, pick.decode_blocks, pick.cost) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("weight", "worker_id"), [(0.226, 1), (0.228, 2)])
def test_a_preferred_taint_turns_8_against_10_blocks_at_weight_0_227(weight: float, worker_id: int) -> None:
    fleet = fleet_with(
        [
            (Role.BOTH, ModelRuntimeConfig()),
            (Role.BOTH, ModelRuntimeConfig(taints=frozenset({Taint("fast")}))),
        ]
    )
    reading = view(fleet, active=[8, 10], fresh=[0, 0], settings=RoutingSettings(track_prefill_tokens=False))
    decision = route(request(constraints=prefer(fast=weight)), reading)
    assert decision.decode.rank.worker_id == worker_id
    unlike = route(request(constraints=prefer(fast=-5.0)), reading, explain=True)
    assert unlike.rows[1].multiplier == exp(-tanh(-5.0))


def test_preference_weights_are_summed_before_tanh() -> None:
    reading = view(alike(1, "fast", "near"), active=[8], fresh=[0])
    pick = route(request(constraints=prefer(fast=0.25, near=0.5, absent=9.0)), reading).decode
    assert pick.multiplier == exp(-tanh(0.75))
    assert pick.cost == (pick.prefill_blocks + 8) * pick.multiplier
    for huge in ({"fast": 1e308, "near": 1e308}, {"fast": -1e308, "near": -1e308}):
        extreme = route(request(constraints=prefer(**huge)), reading).decode
        assert extreme.multiplier == pytest.approx(exp(-1.0) if huge["fast"] > 0 else exp(1.0))


def test_preferences_do_not_change_a_pinned_request() -> None:
    asked = request(constraints=prefer(fast=1.0), pin=Pin(WorkerId(1)))
    assert route(asked, view(alike(2, "fast"))).decode.multiplier == 1.0


def test_equal_costs_spread_requests_evenly_and_repeatably() -> None:
    reading = view(alike(8))
    chosen = Counter(route(request(f"r{number}"), reading).decode.rank.worker_id for number in range(4000))
    chi_squared = sum((count - 500) ** 2 / 500 for count in chosen.values())
    assert len(chosen) == 8
    assert chi_squared < 24.3  # 7 degrees of freedom: one in a thousand
    assert route(request("r7"), reading) == route(request("r7"), view(alike(8), seed=5, turn=9))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_softmax_shares_follow_the_normalised_range(temperature: float) -> None:
    fleet = alike(2)
    settings = RoutingSettings(temperature=temperature)
    worse = sum(
        route(
            request(), view(fleet, active=[100, 700], fresh=[0, 0], settings=settings, seed=seed)
        ).decode.rank.worker_id
        == 2
        for seed in range(4000)
    )
    assert worse / 4000 == pytest.approx(1 / (1 + exp(1 / temperature)), abs=0.02)


@pytest.mark.parametrize("temperature", [1e-320, 1e-3, 1.0, 1e300])
@pytest.mark.parametrize("weight", [0.0, 1.0, 1e308])
def test_extreme_finite_inputs_give_a_decision(temperature: float, weight: float) -> None:
    fleet = fleet_with([(Role.BOTH, ModelRuntimeConfig()), (Role.PREFILL, ModelRuntimeConfig())] * 2)
    for worker_id in (2, 4):
        fleet.set_alive(WorkerId(worker_id), alive=False)
    for number in range(8):
        asked = request(
            f"r{number}",
            isl_tokens=2**40,
            override=RouterConfigOverride(
                overlap_score_weight=weight, router_temperature=temperature * (number % 2)
            ),
        )
        assert route(asked, view(fleet)).decode.rank.worker_id in (1, 3)


def test_round_robin_goes_through_every_rank_in_turn() -> None:
    fleet = alike(3)
    settings = RoutingSettings(mode=RouterMode.ROUND_ROBIN)
    chosen = [
        route(request(), view(fleet, active=[9, 0, 0], settings=settings, turn=turn)).decode.rank.worker_id
        for turn in range(6)
    ]
    assert chosen == [1, 2, 3, 1, 2, 3]


def test_round_robin_picks_every_pair_equally_often() -> None:
    fleet = fleet_with([(Role.PREFILL, ModelRuntimeConfig())] * 2 + [(Role.DECODE, ModelRuntimeConfig())] * 2)
    settings = RoutingSettings(mode=RouterMode.ROUND_ROBIN)
    pairs: Counter[tuple[WorkerRank, WorkerRank]] = Counter()
    for turn in range(8):
        decision = route(request(), view(fleet, settings=settings, turn=turn))
        assert decision.prefill is not None
        pairs[decision.prefill.rank, decision.decode.rank] += 1
    assert sorted(pairs.values()) == [2, 2, 2, 2]


def test_random_mode_draws_evenly_from_the_seed() -> None:
    fleet = alike(4)
    settings = RoutingSettings(mode=RouterMode.RANDOM)

    def draw(seed: int) -> Decision:
        return route(request(), view(fleet, settings=settings, seed=seed))

    assert draw(3) == draw(3)
    counts = Counter(draw(seed).decode.rank.worker_id for seed in range(2000))
    assert all(400 < count < 600 for count in counts.values())
    assert len(counts) == 4


def test_a_request_may_override_the_router_mode() -> None:
    asked = request(override=RouterConfigOverride(router_mode=RouterMode.ROUND_ROBIN))
    decision = route(asked, view(alike(2), active=[0, 9], turn=1))
    assert (decision.mode, decision.decode.rank.worker_id) == (RouterMode.ROUND_ROBIN, 2)


def test_a_kv_transfer_costs_the_links_time() -> None:
    def at(role: Role, zone: str) -> tuple[Role, ModelRuntimeConfig]:
        return role, ModelRuntimeConfig(
            topology_domains={"zone": zone}, topology_levels=("zone",), kv_bytes_per_token=100
        )

    fleet = fleet_with([at(Role.PREFILL, "a"), at(Role.DECODE, "a"), at(Role.DECODE, "b")])
    links = LinkTable(by_level={"zone": Link(0.001, 1e6)}, otherwise=Link(0.01, 1e5))
    settings = RoutingSettings(kv_transfer_weight=50.0, links=links)
    reading = view(fleet, overlap=[0, 2, 0], active=[0, 2, 0], fresh=[0, 0, 0], settings=settings)
    decision = route(request(), reading, explain=True)
    near, far = decision.rows[1:]
    assert near.transfer_blocks == pytest.approx(50 * (0.001 + (40 - 8) * 100 / 1e6))
    assert far.transfer_blocks == pytest.approx(50 * (0.01 + 40 * 100 / 1e5))
    assert decision.decode.rank.worker_id == 2  # 2 + 0.21 blocks against 0 + 2.5
    busier = view(fleet, overlap=[0, 2, 0], active=[0, 3, 0], fresh=[0, 0, 0], settings=settings)
    assert route(request(), busier).decode.rank.worker_id == 3


def test_a_topology_weight_overrides_the_requests_for_the_same_taint() -> None:
    here = ModelRuntimeConfig(
        topology_domains={"zone": "a"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement=Enforcement.PREFERRED,
        kv_transfer_preferred_weight=0.85,
    )
    fleet = fleet_with([(Role.PREFILL, here), (Role.DECODE, here)])
    asked = request(constraints=prefer(**{"dynamo.topology/zone=a": -3.0}))
    decision = route(asked, view(fleet))
    assert decision.decode.multiplier == exp(-tanh(0.85))
    assert decision.prefill is not None
    assert decision.prefill.multiplier == exp(-tanh(-3.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overlap_score_weight", -1.0),
        ("overlap_score_weight", float("nan")),
        ("temperature", float("inf")),
        ("kv_transfer_weight", -0.5),
        ("active_decode_blocks_threshold", 1.5),
        ("active_prefill_tokens_threshold", -1),
    ],
)
def test_an_invalid_routing_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        msgspec.structs.replace(RoutingSettings(), **{field: value})


def test_a_column_that_is_too_short_is_an_error() -> None:
    reading = view(alike(2), prefill_tokens=[0])
    with pytest.raises(ValueError, match="1 entries for a fleet of 2 slots"):
        route(request(), reading)


def test_columns_longer_than_the_fleet_are_read_up_to_its_slots() -> None:
    reading = view(alike(2), prefill_tokens=[0] * 9, active=[5, 1, 0, 0], overlap=[0] * 5, fresh=[0] * 4)
    assert route(request(), reading).decode.rank.worker_id == 2
