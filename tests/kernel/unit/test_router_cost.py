"""Which worker is the cheapest, under the costs of time and of LMetric."""

import subprocess
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import numpy as np
import pytest

from kvrouter import _native
from kvrouter.core.constraints import RouterConfigOverride, RoutingConstraints
from kvrouter.core.cost_rules import COST_RULES
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import ModelName, RequestId, Slot, Taint
from kvrouter.core.timing import Timing
from kvrouter.core.workers import ModelRuntimeConfig, Role
from kvrouter.fleetfile.routing_settings import routing_settings
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, RouteRequest, RoutingSettings, View, route
from kvrouter.kernel.routing.costs.time import predictor_of, prompt_s
from kvrouter.kernel.routing.fleet_links import links_of
from kvrouter.kernel.routing.interface import CostInput, Speeds
from kvrouter.kernel.topology.link_table import Link, LinkState, LinkTable
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.plain_fleets import worker_card

BLOCK = 16
NOW_S = 100.0


def fleet_of(*roles: Role, config: ModelRuntimeConfig | None = None, slow_links: bool = False) -> Fleet:
    fleet = Fleet(ModelName("m"), BLOCK)
    for worker_id, role in enumerate(roles, start=1):
        its = config or ModelRuntimeConfig()
        if slow_links:
            its = ModelRuntimeConfig(
                topology_domains={"zone": "ab"[worker_id % 2]},
                topology_levels=("zone",),
                kv_bytes_per_token=100_000,
            )
        fleet.join(worker_card(worker_id, role, its, block_size=BLOCK))
    return fleet


def view(
    fleet: Fleet,
    cost: str = "time",
    *,
    overlap: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    active: Sequence[int] | None = None,
    fresh: Sequence[int] | None = None,
    requests: Sequence[int] | None = None,
    waiting: Sequence[int] | None = None,
    slowness: Sequence[float] | None = None,
    turnover: Sequence[float] | None = None,
    began_s: Sequence[float] | None = None,
    settings: RoutingSettings | None = None,
    unseen: float = 0.0,
    seed: int = 0,
    transfers: LinkState | None = None,
) -> View:
    nothing = [0] * fleet.n_slots
    speeds = None
    if slowness is not None or turnover is not None or began_s is not None:
        ones, zeros = np.ones(fleet.n_slots), np.zeros(fleet.n_slots)
        speeds = Speeds(
            ones if slowness is None else np.array(slowness),
            ones,
            zeros if turnover is None else np.array(turnover),
            zeros if began_s is None else np.array(began_s),
            NOW_S,
            5.0,
        )
    return View(
        fleet=fleet,
        settings=settings or RoutingSettings(cost=cost),
        overlap_blocks=np.array(overlap or nothing, np.uint32),
        prefill_tokens=np.array(tokens or nothing, np.int64),
        active_blocks=np.array(active or nothing, np.int64),
        not_active=None if fresh is None else np.array(fresh, np.uint32),
        cost_input=CostInput(
            np.array(requests or nothing, np.int64),
            np.array(waiting or nothing, np.int64),
            speeds,
            transfers,
        ),
        unseen=unseen,
        seed=seed,
    )


def asked(isl_tokens: int = 3200, **rest: object) -> RouteRequest:
    blocks = -(-isl_tokens // BLOCK)
    return RouteRequest(RequestId("r"), isl_tokens, blocks, **rest)  # type: ignore[arg-type]


def worker(decision: Decision) -> int:
    return decision.decode.rank.worker_id


TWO = (Role.BOTH, Role.BOTH)


def test_of_ranks_with_equal_queues_that_whose_step_began_first_is_picked() -> None:
    def choice(*ago_s: float) -> int:
        began_s = [NOW_S - each for each in ago_s]
        return worker(route(asked(), view(fleet_of(*TWO), tokens=[3000, 3000], began_s=began_s)))

    assert choice(0.01, 0.05) == 2
    assert choice(0.05, 0.01) == 1


def test_a_late_step_counts_for_up_to_half_of_its_time() -> None:
    def queue_s(ago_s: float, tokens: int = 3000) -> float:
        chosen = view(fleet_of(Role.BOTH), tokens=[tokens], began_s=[NOW_S - ago_s])
        times = route(asked(), chosen).decode.times
        assert times is not None
        return times.queue_s

    step_s = Timing().prefill_ms(3000) / 1e3
    assert queue_s(0.0) == pytest.approx(step_s)
    assert queue_s(step_s + 0.001) == pytest.approx(0.001)
    assert queue_s(50.0) == queue_s(inf) == pytest.approx(step_s / 2)
    assert queue_s(0.0, tokens=0) == queue_s(50.0, tokens=0) == 0.0


def test_a_cached_prompt_outweighs_a_queue_shorter_than_its_prefill() -> None:
    cached = [0, 150]
    assert worker(route(asked(), view(fleet_of(*TWO), overlap=cached, tokens=[0, 2000]))) == 2
    assert worker(route(asked(), view(fleet_of(*TWO), overlap=cached, tokens=[0, 20_000]))) == 1


def test_a_slow_rank_is_picked_only_if_its_cache_saves_enough_time() -> None:
    def choice(*cached: int) -> int:
        return worker(route(asked(), view(fleet_of(*TWO), slowness=[3.0, 1.0], overlap=cached)))

    assert [choice(0, 0), choice(100, 0), choice(190, 0)] == [2, 2, 1]


def test_a_rank_without_free_memory_or_seats_loses_despite_its_cache() -> None:
    small = ModelRuntimeConfig(total_kv_blocks=1000, max_num_seqs=8)
    fleet = fleet_of(*TWO, config=small)
    assert worker(route(asked(), view(fleet, overlap=[200, 0], active=[700, 700]))) == 1
    full = route(asked(), view(fleet, overlap=[200, 0], active=[1000, 700]), explain=True)
    assert worker(full) == 2
    assert [row.times.memory_s for row in full.rows if row.times] == [pytest.approx(5 / 5 + 5 / 2), 0.0]
    seated = route(asked(), view(fleet, overlap=[200, 0], requests=[12, 3]), explain=True)
    assert worker(seated) == 2
    assert [row.times.memory_s for row in seated.rows if row.times] == [pytest.approx(5 * 5 / 8), 0.0]


def test_a_wait_for_one_block_is_a_wait_for_an_answer_to_end() -> None:
    def choice(answers: int) -> int:
        small = ModelRuntimeConfig(total_kv_blocks=1000)
        taken = view(
            fleet_of(*TWO, config=small), overlap=[100, 0], active=[801, 700], requests=[answers, answers]
        )
        decision = route(asked(), taken, explain=True)
        waits = [row.times.memory_s for row in decision.rows if row.times]
        assert waits == [pytest.approx(5 * (1 / 1000 + 0.5 / answers)), 0.0]
        return worker(decision)

    assert [choice(2), choice(4000)] == [2, 1]


def test_a_request_among_many_waiting_goes_to_its_cached_rank() -> None:
    """Alone it would go to the shorter queue; it makes all that wait there wait longer."""
    fleet, cached = fleet_of(*TWO), [0, 200]
    assert worker(route(asked(), view(fleet, overlap=cached, tokens=[0, 12_000]))) == 1
    crowd = view(fleet, overlap=cached, tokens=[40_000, 52_000], waiting=[30, 30], requests=[30, 30])
    assert worker(route(asked(), crowd)) == 2


def test_the_rank_with_less_cache_turnover_wins_a_tie() -> None:
    fleet = fleet_of(*TWO)
    assert worker(route(asked(), view(fleet, turnover=[1.0, 0.5]))) == 2
    assert worker(route(asked(), view(fleet, turnover=[0.5, 1.0]))) == 1


def test_the_decode_cost_of_time_includes_transfer_seconds() -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    links = LinkTable({"zone": Link(1e-4, 1e10)}, Link(1e-3, 1e8), {})
    settings = RoutingSettings(cost="time", links=links)
    fleet = fleet_of(*roles, slow_links=True)
    decision = route(asked(), view(fleet, active=[0, 0, 500], settings=settings))
    assert worker(decision) == 3
    assert decision.decode.times is not None
    assert decision.decode.times.transfer_s == pytest.approx(1e-4 + 3200 * 100_000 / 1e10)
    assert decision.decode.transfer_blocks == 0.0
    blocks = RoutingSettings(links=links)
    assert worker(route(asked(), view(fleet, active=[0, 0, 500], settings=blocks))) == 2


def test_a_loaded_link_loses_to_a_slower_idle_link() -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    links = LinkTable({"zone": Link(1e-4, 1e10)}, Link(1e-3, 2e9), {})
    settings = RoutingSettings(cost="time", links=links)
    fleet, loads = fleet_of(*roles, slow_links=True), LinkState()
    taken = view(fleet, settings=settings, transfers=loads)
    assert worker(route(asked(), taken)) == 3
    crowded = links_of(fleet, links).shared(Slot(0), Slot(2))
    assert crowded is not None
    for _ in range(9):
        loads.add(crowded, 1e9)
    decision = route(asked(), taken, explain=True)
    assert worker(decision) == 2
    alone_s = 3200 * 100_000 / 1e10
    (row,) = (row for row in decision.rows if row.rank.worker_id == 3)
    assert row.times is not None
    assert row.times.transfer_s == pytest.approx(1e-4 + 10 * alone_s)
    for _ in range(9):
        loads.remove(crowded, 1e9)
    assert worker(route(asked(), taken)) == 3


def test_preferred_taints_multiply_the_cost_of_time() -> None:
    fleet = fleet_of(*TWO)
    config = ModelRuntimeConfig(taints=frozenset({Taint("gpu")}))
    fleet.join(worker_card(3, config=config, block_size=BLOCK))
    constraints = RoutingConstraints(preferred_taints={Taint("gpu"): 2.0})
    decision = route(asked(constraints=constraints), view(fleet, tokens=[0, 0, 4000]))
    assert worker(decision) == 3
    assert decision.decode.multiplier < 1.0
    assert decision.decode.times is not None
    assert decision.decode.cost == pytest.approx(sum(decision.decode.times) * decision.decode.multiplier)


def test_a_request_with_overlap_weight_0_ignores_prefill_time() -> None:
    view_ = view(fleet_of(*TWO), overlap=[0, 200], tokens=[0, 8000])
    heavy = RouterConfigOverride(overlap_score_weight=0.0)
    assert worker(route(asked(), view_)) == 1
    assert {worker(route(asked(override=heavy), view_))} <= {1, 2}
    decision = route(asked(override=heavy), view_)
    assert decision.decode.times is not None
    assert decision.decode.cost == pytest.approx(decision.decode.times.decode_s)


def test_all_cost_rules_report_equal_block_counts() -> None:
    made = {
        cost: route(
            asked(),
            view(fleet_of(Role.BOTH), cost, overlap=[50], tokens=[64], active=[7], fresh=[150]),
            explain=True,
        )
        for cost in COST_RULES
    }
    parts = {
        (row.overlap_blocks, row.prefill_blocks, row.decode_blocks, row.transfer_blocks)
        for decision in made.values()
        for row in decision.rows
    }
    parts |= {
        (pick.overlap_blocks, pick.prefill_blocks, pick.decode_blocks, pick.transfer_blocks)
        for pick in (decision.decode for decision in made.values())
    }
    assert parts == {(50, 154.0, 157.0, 0.0)}
    assert made["blocks"].decode.times is made["lmetric"].decode.times is None


def test_lmetric_is_the_product_of_prompt_tokens_and_requests() -> None:
    fleet = fleet_of(Role.BOTH, Role.BOTH, Role.BOTH)
    taken = view(fleet, "lmetric", overlap=[100, 0, 0], tokens=[0, 0, 500], requests=[3, 1, 0])
    decision = route(asked(), taken, explain=True)
    assert [row.cost for row in decision.rows] == [1600 * 4, 3200 * 2, 3700]
    assert worker(decision) == 3


def test_lmetric_picks_the_fewest_requests_without_tokens_to_prefill() -> None:
    taken = view(fleet_of(*TWO), "lmetric", requests=[4, 3])
    assert worker(route(asked(isl_tokens=0), taken)) == 2


def test_the_lmetric_decode_leg_goes_to_the_fewest_requests() -> None:
    fleet = fleet_of(Role.PREFILL, Role.DECODE, Role.DECODE)
    decision = route(asked(), view(fleet, "lmetric", active=[0, 1, 90], requests=[0, 5, 4]))
    assert (worker(decision), decision.decode.cost) == (3, 5.0)


@pytest.mark.parametrize("cost", ["time", "lmetric"])
def test_unseen_requests_of_other_routers_vary_the_pick(cost: str) -> None:
    fleet = fleet_of(*[Role.BOTH] * 4)
    chosen = {worker(route(asked(), view(fleet, cost, unseen=3.0, seed=seed))) for seed in range(64)}
    assert len(chosen) > 1


def test_prefill_time_is_the_sum_of_full_steps_and_a_last_step() -> None:
    timing = Timing()
    assert prompt_s(timing, 20_000) == pytest.approx(
        (2 * timing.prefill_ms(8192) + timing.prefill_ms(20_000 - 2 * 8192)) / 1e3
    )
    assert prompt_s(timing, 0) == 0.0


def test_a_negative_weight_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="decode_weight"):
        RoutingSettings(decode_weight=-1.0)


def test_the_native_predictor_refuses_unfit_columns_by_name() -> None:
    timing = [0.0] * 11
    predictor = _native.Predictor(
        timing,
        chunk_tokens=8192,
        others_weight=0.5,
        later_weight=12.0,
        stalls_weight=1.0,
        turnover_weight=0.1,
        decode_weight=1.0,
    )
    counts, figures = np.zeros(2, np.int64), np.ones(2)
    read = (None, None, counts, counts, counts, counts, *[figures] * 6, np.ones(2, np.bool_))
    columns = _native.RankColumns(2, read)
    wanted = ((16.0, 1.0, 16.0, 5.0, 1.0, 1.0, 0.0), (True, True, True, True, False))
    predictor.totals(np.empty(2), columns, wanted)
    with pytest.raises(ValueError, match="among: at least 2"):
        predictor.totals(np.empty(2), columns, wanted, np.ones(1, np.bool_))
    with pytest.raises(IndexError, match="columns: of 2 slots, not 3"):
        predictor.totals(np.empty(3), columns, wanted)
    with pytest.raises(IndexError, match="columns: of 2 slots, not 3"):
        predictor.parts(2, columns, wanted)
    with pytest.raises(ValueError, match="prefill_tokens: at least 3"):
        _native.RankColumns(3, read)
    with pytest.raises(TypeError, match="waiting"):
        _native.RankColumns(2, (*read[:5], figures, *read[6:]))
    with pytest.raises(TypeError, match="seats: a column, not None"):
        _native.RankColumns(2, (*read[:7], None, *read[8:]))
    with pytest.raises(TypeError, match="takes_whole: a column, not None"):
        _native.RankColumns(2, (*read[:12], None))
    with pytest.raises(ValueError, match="chunk_tokens"):
        _native.Predictor(
            timing,
            chunk_tokens=0,
            others_weight=0,
            later_weight=0,
            stalls_weight=0,
            turnover_weight=0,
            decode_weight=0,
        )


@pytest.mark.parametrize(
    "flags",
    [(True, False), (False, True), (True, True), (False, False)],
    ids=["prefill", "decode", "both", "-"],
)
def test_slots_not_asked_for_have_infinite_cost(flags: tuple[bool, bool]) -> None:
    predictor = predictor_of(Timing(), 8.0)
    counts, figures = np.arange(3), np.full(3, 100.0)
    read = (None, None, counts, counts, counts, counts, *[figures] * 6, np.ones(3, np.bool_))
    columns = _native.RankColumns(3, read)
    wanted = ((16.0, 1.0, 16.0, 5.0, 1.0, 1.0, 0.0), (*flags, True, True, False))
    everywhere, some = np.empty(3), np.empty(3)
    predictor.totals(everywhere, columns, wanted)
    predictor.totals(some, columns, wanted, np.array([1, 0, 1], np.bool_))
    assert some.tolist() == [everywhere[0], np.inf, everywhere[2]]


def test_a_timing_file_sets_the_predicted_times(tmp_path: Path) -> None:
    path = tmp_path / "timing.yaml"
    path.write_text("prefill_quadratic: 0\nprefill_linear: 1\nprefill_base: 0\n", "utf-8")
    settings = routing_settings(KvRouterConfig(router_cost="time", router_timing=str(path)), None)
    decision = route(asked(), view(fleet_of(Role.BOTH), settings=settings))
    assert decision.decode.times is not None
    assert decision.decode.times.prefill_s == pytest.approx(3.2)
    path.write_text("prefill_linear: fast\n", "utf-8")
    with pytest.raises(ConfigError, match=r"router_timing: .*timing.yaml:1: prefill_linear"):
        routing_settings(KvRouterConfig(router_timing=str(path)), None)
    with pytest.raises(ConfigError, match="router_timing: "):
        routing_settings(KvRouterConfig(router_timing=str(tmp_path / "none.yaml")), None)


def test_a_toy_cost_rule_can_be_registered_and_passes_its_checks() -> None:
    """In a process of its own: the rules are those that are registered when it begins."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.testing.toy_cost.registration"]
    command += ["-p", "no:cacheprovider", "tests/testing/toy_cost/checks.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("....  "), done.stdout
