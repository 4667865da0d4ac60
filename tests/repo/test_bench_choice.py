"""What the cost of time chooses: what is replayed, and what the page says."""

from pathlib import Path

from benchmarks.choice import page
from benchmarks.choice.aggregated import (
    BLOCKS_RULE,
    GRID,
    KNOWING,
    SCENES,
    SIZES,
    TIME,
    AggregatedReplays,
    jobs,
    measured,
)
from benchmarks.choice.page import CostStudy, default_of, markdown
from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.cases import CASES, WINDOWS
from benchmarks.replay.contest import POINTS_MAX, TUNED, Cell, Contest, Entrant, Job, Tuned
from benchmarks.replay.fleets import AGGREGATED, HALF_SLOW, MEMORY_TOKENS
from benchmarks.replay.replays import Figures
from benchmarks.replay.table import HOW
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.replay.variant import OURS
from kvrouter.sim.rules.registry import RULES

FOLDER = Path(page.__file__).parent
LONG_SESSIONS = 3


def figures(policy: str, ttft: float, failed: int = 0) -> Figures:
    return Figures(
        policy=policy,
        ttft_ms=(ttft, ttft),
        ttft_p99_ms=(100.0, 100.0),
        itl_ms=(8.0, 8.0),
        good=(1.0, 1.0),
        good_per_s=(3.0, 3.0),
        cached=(0.5, 0.5),
        failed=(failed, failed),
    )


def cell(*of: Figures, case: int = 0, kind: str = AGGREGATED) -> Contest:
    return Contest((), (Cell(Job(case, kind, 8, MEMORY_TOKENS, 0.8, 700, 2), 1, 2.0, of),))


def study_of(*contests: Contest) -> CostStudy:
    return CostStudy(
        form="short",
        measured_at="now",
        commit=Commit("0123456789ab", False),
        machine=Machine(cpu="c", cores=2, system="s", python="3"),
        rows=700,
        seeds=5,
        contests=contests,
    )


def test_every_contest_of_costs_is_replayed_once() -> None:
    """A closed loop's load is its own: another share of it would be the same contest."""
    found = jobs(700, 5, range(len(CASES)), SIZES, len(SCENES))
    closed = sum(case.is_closed for case in CASES)
    assert len({job.key for job in found}) == len(found) == len(CASES) * (2 * len(SCENES) + 1) - 2 * closed
    shares = {job.share for job in found if CASES[job.case].is_closed and job.kind == AGGREGATED}
    assert shares == {SCENES[0][1]}


def test_ours_is_tuned_over_as_many_points_as_a_rule_may_be() -> None:
    assert len(set(GRID)) == len(GRID) <= POINTS_MAX
    assert GRID[0] == TIME, "the default is tried first"


def test_workers_of_unlike_speed_are_compared_with_knowing_it() -> None:
    found = measured(Job(LONG_SESSIONS, HALF_SLOW, 8, MEMORY_TOKENS, 0.5, 60, 2))
    assert len(found.cells) == WINDOWS - 1
    for each in found.cells:
        policies = [of.policy for of in each.figures]
        assert policies[:4] == [OURS, BLOCKS_RULE, KNOWING, TUNED]
        assert {policy.partition(":")[0] for policy in policies[4:]} <= set(RULES)


def test_who_knows_has_the_speeds_of_the_slow_half() -> None:
    replays = AggregatedReplays(Job(LONG_SESSIONS, HALF_SLOW, 8, MEMORY_TOKENS, 0.5, 40, 1))
    simulation, _ = replays.simulation(Entrant(KNOWING), 1, 0)
    speeds = simulation.fleet.placer.learned.speeds.speeds(8, now_s=0.0)
    assert speeds.slowness.tolist() == [1.0] * 4 + [2.0] * 4


def test_time_is_the_default_if_faster_on_every_trace_without_failures() -> None:
    def on(case: int, ratio: float, failed: int = 0) -> Contest:
        return cell(figures(OURS, 100.0 * ratio, failed), figures(BLOCKS_RULE, 100.0), case=case)

    assert default_of(study_of(on(0, 0.5), on(0, 1.5), on(1, 0.9))) == "time"
    assert default_of(study_of(on(0, 0.5), on(1, 1.1))) == "blocks"
    assert default_of(study_of(on(0, 0.5), on(1, 0.5, failed=1))) == "blocks"


def test_the_default_router_cost_is_what_the_page_says() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    assert f"\n`--router-cost {KvRouterConfig().cost}`. Time is the default where" in text


def test_the_page_compares_with_tuned_rules_and_with_knowing() -> None:
    peer = figures("lmetric", 80.0)
    plain = cell(figures(OURS, 90.0), figures(BLOCKS_RULE, 100.0), figures(TUNED, 85.0), peer)
    slow = cell(
        figures(OURS, 96.0),
        figures(BLOCKS_RULE, 100.0),
        figures(KNOWING, 90.0),
        figures(TUNED, 85.0),
        peer,
        kind=HALF_SLOW,
    )
    tuned = (Tuned("lmetric", 0, 80.0, 1),)
    text = markdown(study_of(Contest(tuned, plain.cells), Contest(tuned, slow.cells)))
    assert HOW in text
    assert "blocks / theirs | tuned / theirs |" in text
    assert "| 1.125 (1.125 to 1.125) | 1.000 | 1.000 | 1.250 | 1.062 |" in text
    assert "| conversation | 2 | 96 | 100 | 90 | 100 | **1.067** |" in text
    assert text.index("## Where ours loses") < text.index("## Bars over the whole table")
