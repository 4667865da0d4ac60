"""Critical requests and objectives in a replay: who is answered in time at 1.5 times the capacity."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.cli import main
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.dispatch import ByTimeStamp
from kvrouter.sim.replay.outcome import Outcome
from kvrouter.sim.replay.simulation import Simulation
from tests.testing.replays import PIECE_TOKENS, fleet, row

TRAFFIC = """
generate:
  {requests: 2500, rate_per_s: 20, input: {mean: 3000}, output: {mean: 150}, tenants: 10, turn_share: 0.5}
"""
SLO_S = 2


def summary_of(folder: Path, policy: str, speedup: float) -> dict[str, Any]:
    traffic, written = folder / "traffic.yaml", folder / "out.json"
    traffic.write_text(TRAFFIC)
    options = ("--critical-share", "0.2", "--slo-ttft", str(SLO_S), "--slo-itl", "60")
    asked = ["replay", str(traffic), *options, "--speedup", str(speedup), "--policy", policy]
    assert main([*asked, "--output", f"json={written}"]) == 0
    (variant,) = json.loads(written.read_text())["variants"]
    found: dict[str, Any] = variant["summaries"][0]
    return found


def test_overload_leaves_goodput_and_critical_requests_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = f"kvrouter:slo_ttft_ms={SLO_S * 1000}"
    at_capacity, above = (summary_of(tmp_path, refusing, speedup) for speedup in (6.7, 10.0))
    out = capsys.readouterr().out
    assert above["good_per_s"] >= 0.9 * at_capacity["good_per_s"]
    critical, others = above["classes"]
    assert (critical["is_critical"], others["is_critical"]) == (True, False)
    assert critical["requests"] + others["requests"] == above["requests"] == 2500
    assert critical["ttft_ms"]["p99"] <= SLO_S * 1000
    assert critical["in_time_share"] >= 0.99
    assert others["failed"] > critical["failed"]
    assert above["errors"] == {"slo_unreachable": critical["failed"] + others["failed"]}
    assert f"{refusing}: critical: {critical['requests']} requests, TTFT p99 " in out
    plain = summary_of(tmp_path, "kvrouter", 10.0)
    assert plain["classes"][0]["ttft_ms"]["p99"] > SLO_S * 1000, "what an objective is for"


def outcomes(file: FleetFile, *, share: float, n: int = 40) -> list[Outcome]:
    rows = [row(number, 0.0, [number], output_tokens=200) for number in range(n)]
    simulation = Simulation(
        file,
        rows,
        config=file.router,
        dispatch=ByTimeStamp(),
        piece_tokens=PIECE_TOKENS,
        critical_share=share,
    )
    return sorted(simulation.run().outcomes, key=lambda outcome: outcome.number)


LINE = (
    "workers: [{name: w}]\n"
    "router: {active_prefill_tokens_threshold: 0, admission_queue_max: 99, admission_wait_s: 99.0%s}"
)


def test_critical_requests_leave_the_line_first_and_nobody_is_lost() -> None:
    ended = outcomes(fleet(LINE % ""), share=0.3)
    assert not any(outcome.error for outcome in ended)
    waited = [outcome for outcome in ended if outcome.placed_s]
    placed = {
        is_critical: [each.placed_s or 0.0 for each in waited if each.is_critical is is_critical]
        for is_critical in (True, False)
    }
    assert max(placed[True]) <= min(placed[False])
    assert placed[False] == sorted(placed[False]), "of one class, who came first"


@pytest.mark.parametrize("cost", ["time", "blocks"])
def test_a_request_waits_in_the_line_no_longer_than_it_is_of_use(cost: str) -> None:
    ended = outcomes(fleet(LINE % f", slo_ttft_ms: 100, router_cost: {cost}"), share=0.0)
    assert {outcome.error for outcome in ended} == {"", "slo_unreachable"}
    assert all(outcome.placed_s is None or outcome.placed_s <= 0.1 for outcome in ended)
