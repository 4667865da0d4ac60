"""Rules that are compared get the parameters that suit the trace, from its first half alone."""

import json
from pathlib import Path

import pytest

from kvrouter.cli import main
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import parse_document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.outcome import Outcome
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import Objective, summarize
from kvrouter.sim.replay.timetable import DieEvent
from kvrouter.sim.replay.tuning import candidates, merit, ours_grid, points, second_half
from kvrouter.sim.replay.variant import DEFAULT_FLEET, OURS, parse_sweep
from kvrouter.sim.rules.registry import GRID_MAX, RULES
from tests.testing.replays import TWO_ZONES, fleet, replayed, row


def outcome(number: int, *, ttft_s: float | None = None, error: str = "") -> Outcome:
    return Outcome(
        number=number,
        arrived_s=0.0,
        input_tokens=1,
        output_tokens=1,
        ceiling_tokens=0,
        first_s=ttft_s,
        error=error,
    )


def test_tuning_grid_of_every_policy_is_within_the_maximum() -> None:
    assert {name: len(points(name)) for name in RULES if len(points(name)) > GRID_MAX} == {}
    assert points("lmetric") == ["lmetric"]
    assert points("sticky:escape=3") == ["sticky:escape=3"]
    assert points(OURS)[:2] == ["kvrouter:router_cost=time", "kvrouter:overlap_score_weight=0.5"]
    for roles in ((Role.BOTH,), (Role.PREFILL, Role.DECODE), (Role.BOTH, Role.PREFILL, Role.DECODE)):
        assert len(set(ours_grid(roles))) == len(ours_grid(roles)) <= GRID_MAX


def test_kvrouter_grid_includes_transfer_weights_where_legs_are_apart() -> None:
    workers = "workers: [{name: p, role: prefill}, {name: d, role: decode}]"
    apart = parse_document(f"version: 1\nmodels: [{{name: m}}]\n{workers}\n", "fleet")
    ((time, *weights),) = candidates(apart, [OURS], [])
    assert time.fleet.router.cost == "time"
    assert {variant.fleet.router.cost for variant in weights} == {"blocks"}
    assert [variant.fleet.router.kv_transfer_weight for variant in weights] == [
        0,
        10,
        30,
        100,
        300,
        1_000,
        3_000,
    ]
    ((time, *weights),) = candidates(parse_document(DEFAULT_FLEET, "fleet"), [OURS], [])
    assert time.fleet.router.cost == "time"
    assert {variant.fleet.router.cost for variant in weights} == {"blocks"}
    assert {variant.fleet.router.kv_transfer_weight for variant in weights} == {0}
    assert [variant.fleet.router.overlap_score_weight for variant in weights] == [0.5, 1, 2, 4, 8, 16]


def test_published_parameters_of_every_rule_are_in_its_grid() -> None:
    for name, rule in RULES.items():
        assert not rule.grid or rule.parameters in rule.grid, name


def test_each_swept_value_is_tuned_separately() -> None:
    document = parse_document(DEFAULT_FLEET, "fleet")
    found = candidates(document, ["sticky", "random"], [parse_sweep("workers[0].replicas=2,4")])
    assert [len(chosen_from) for chosen_from in found] == [10, 10, 1, 1]
    for chosen_from in found:
        assert len({variant.fleet.workers[0].replicas for variant in chosen_from}) == 1


def test_tuning_prefers_fewest_failures_and_then_lowest_ttft() -> None:
    slow, fast, failed = outcome(0, ttft_s=2.0), outcome(1, ttft_s=1.0), outcome(2, error="no_workers")
    assert merit(Outcomes([slow])) > merit(Outcomes([fast]))
    assert merit(Outcomes([fast, failed])) > merit(Outcomes([slow, slow]))
    assert merit(Outcomes()) == (0, float("inf"))


def test_second_half_of_a_trace_has_no_request_of_the_first() -> None:
    outcomes = [outcome(number, ttft_s=1.0) for number in range(7)]
    outcomes[3].arrived_s = outcomes[4].arrived_s = outcomes[5].arrived_s = outcomes[6].arrived_s = 10.0
    file = load_fleet(parse_document(DEFAULT_FLEET, "fleet")).fleet
    half = second_half(Result(Outcomes(outcomes), ended_s=14.0), 7, Places(file))
    assert [each.number for each in half.outcomes] == [3, 4, 5, 6]
    assert half.ended_s == 4.0


def test_bytes_and_cost_of_a_half_are_of_the_same_requests() -> None:
    priced = TWO_ZONES.replace("latency_s: 1.0,", "latency_s: 1.0, price_per_gb: 2.0,")
    file = fleet("kv_transfer: {domain: zone, enforcement: fallback}" + priced)
    rows = [row(number, 20.0 * number, [2 * number, 2 * number + 1]) for number in range(4)]
    dies = [DieEvent(at_s=0.0, group="pb"), DieEvent(at_s=0.0, group="da")]
    places = Places(file)
    whole = replayed(rows, file, timetable=dies)
    (of_half,) = summarize(second_half(whole, 4, places), Objective(), places).carried
    (of_whole,) = summarize(whole, Objective(), places).carried
    assert (of_half.src, of_half.dst, of_half.transfers) == ("a", "b", 2)
    assert (of_whole.transfers, of_whole.bytes) == (4, 2 * of_half.bytes)
    assert of_half.cost == pytest.approx(2.0 * of_half.bytes / 1e9)


def test_tuned_replay_names_its_parameters_and_reports_the_second_half(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    path = "data/mooncake-conversation-sample.jsonl"
    arguments = ("--rows", "60", "--compare", "kvrouter,sticky,lmetric", "--tune", "--output", f"json={out}")
    assert main(["replay", path, *arguments]) == 0
    report = json.loads(out.read_text())
    assert "tuned on the first half" in report["dispatch"]
    names = [variant["name"] for variant in report["variants"]]
    assert names[0].startswith("kvrouter:overlap_score_weight=")
    assert names[1].startswith("sticky:escape=")
    assert names[2] == "lmetric"
    assert {variant["summaries"][0]["requests"] for variant in report["variants"]} == {30}


def test_tuning_of_a_trace_with_too_few_requests_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "data/mooncake-conversation-sample.jsonl", "--rows", "19", "--tune"]) != 0
    assert "tune: the trace has 19 requests; halves need 20" in capsys.readouterr().err
