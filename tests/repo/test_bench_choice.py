"""What the cost of time chooses: what is replayed, which bars are missed, what the page says."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.choice import page
from benchmarks.choice.aggregated import (
    BLOCKS,
    BLOCKS_RULE,
    FEW_SEEDS,
    FRONTIER,
    KNOWING,
    LOADS,
    TIME,
    Cell,
    Figures,
    Job,
    frontier,
    jobs,
    measured,
)
from benchmarks.choice.page import Study, default_of, markdown, row_of
from benchmarks.http_replay.machine import Commit, Machine
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.replay.variant import OURS
from kvrouter.sim.rules.registry import RULES

RESULTS = Path(page.__file__).parent


def figures(policy: str, ttft: float, p99: float = 100.0, itl: float = 8.0, failed: int = 0) -> Figures:
    return Figures(policy, (ttft, ttft), (p99, p99), (itl, itl), (1.0, 1.0), (failed, failed))


def cell(*of: Figures, blocks: int = BLOCKS[0], slow: bool = False, load: float = 3.0) -> Cell:
    return Cell(Job(0, load, blocks, slow, 3000, 2), of)


def test_every_cell_has_a_distinct_key() -> None:
    keys = {job.key for job in jobs(3000, 10, range(4), LOADS)}
    assert len(keys) == 4 * len(LOADS) * (len(BLOCKS) + 1)


def test_a_cell_has_our_policies_and_the_best_rule_for_each_seed() -> None:
    found = measured(Job(0, 1.0, BLOCKS[0], True, 60, 4))
    policies = [each.policy for each in found.figures]
    assert policies[:3] == [TIME, BLOCKS_RULE, KNOWING]
    assert [policy.partition(":")[0] in RULES for policy in policies[3:]] == [True]
    assert all(len(set(each.ttft_ms)) == 4 for each in found.figures)


def test_other_settings_are_replayed_for_a_missed_bar() -> None:
    found = frontier(Job(0, 1.0, BLOCKS[0], False, 60, 10))
    assert [each.policy for each in found.figures] == list(FRONTIER)
    assert all(len(each.ttft_ms) == FEW_SEEDS for each in found.figures)


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (figures(TIME, 70.0), ()),
        (figures(TIME, 80.5), ("mean TTFT of the best rule", "mean TTFT of blocks")),
        (figures(TIME, 70.0, p99=130.0), ("p99 TTFT of blocks",)),
        (figures(TIME, 70.0, itl=9.5), ("mean ITL of blocks",)),
        (figures(TIME, 70.0, failed=2), ("2 failed",)),
    ],
)
def test_a_missed_bar_is_named(ours: Figures, missed: tuple[str, ...]) -> None:
    row = row_of(
        cell(ours, figures(BLOCKS_RULE, 100.0, 120.0, 9.0), figures("a", 75.0), figures("b", 60.0, failed=1))
    )
    assert row.best.policy == "a"
    assert len(row.missed) == len(missed)
    for text, name in zip(row.missed, missed, strict=True):
        assert text.startswith(name)


def test_small_caches_and_slow_workers_have_their_own_bars() -> None:
    blocks, rule = figures(BLOCKS_RULE, 50.0, 50.0), figures("a", 100.0)
    assert row_of(cell(figures(TIME, 101.0, 101.0), blocks, rule, blocks=512)).missed == ()
    assert len(row_of(cell(figures(TIME, 103.0, 103.0), blocks, rule, blocks=512)).missed) == 2
    knowing = figures(KNOWING, 100.0)
    assert row_of(cell(figures(TIME, 104.0), blocks, knowing, rule, slow=True)).missed == ()
    assert len(row_of(cell(figures(TIME, 106.0), blocks, knowing, rule, slow=True)).missed) == 1


def study_of(*cells: Cell) -> Study:
    machine = Machine(cpu="c", cores=2, system="s", python="3")
    return Study("short", "now", Commit("0123456789ab", False), machine, 3000, 2, cells)


def test_time_is_the_default_if_faster_on_every_trace_without_failures() -> None:
    def on(case: int, ratio: float, failed: int = 0) -> Cell:
        ours, blocks = figures(TIME, 100.0 * ratio, failed=failed), figures(BLOCKS_RULE, 100.0)
        return Cell(Job(case, 3.0, BLOCKS[0], False, 3000, 2), (ours, blocks, figures("a", 90.0)))

    assert default_of(study_of(on(0, 0.5), on(0, 1.5), on(1, 0.9))) == "time"
    assert default_of(study_of(on(0, 0.5), on(1, 1.1))) == "blocks"
    assert default_of(study_of(on(0, 0.5), on(1, 0.5, failed=1))) == "blocks"


def test_the_default_router_cost_matches_the_measured_study() -> None:
    study = msgspec.json.decode((RESULTS / "results" / "short.json").read_bytes(), type=Study)
    assert KvRouterConfig().cost is default_of(study)


def test_the_page_names_missed_bars() -> None:
    of = (figures(TIME, 90.0), figures(BLOCKS_RULE, 100.0), figures("a", 80.0))
    slow = (figures(TIME, 90.0), figures(BLOCKS_RULE, 100.0), figures(KNOWING, 89.0), figures("a", 80.0))
    machine = Machine(cpu="a CPU", cores=2, system="Linux", python="3")
    cells = (cell(*of, load=1.0), cell(*slow, slow=True))
    text = markdown(Study("short", "now", Commit("0123456789ab", False), machine, 3000, 2, cells))
    assert (
        "| conversation | 1 | 4096 | 90 | 100 | 8.0 | 100 | 100 | 8.0 | a | 80 | 100 | 0.900 | 1.125 |"
        in text
    )
    assert "- conversation, 1 times as fast, 4096 blocks: mean TTFT of the best rule 1.125, wanted 1" in text
    assert "| conversation | 3 | 90 | 100 | 89 | 100 | 100 | a | 80 | 1.011 |" in text


def test_the_page_shows_other_settings_for_missed_bars() -> None:
    few, one, two = (f"{OURS}:router_decode_weight={weight}" for weight in (1, 2, 3))
    missed = cell(figures(TIME, 90.0), figures(BLOCKS_RULE, 100.0), figures("a", 80.0), load=1.0)
    nowhere = msgspec.structs.replace(missed, job=msgspec.structs.replace(missed.job, load=5.0))
    other = figures(few, 79.0, p99=99.0), figures(one, 70.0, itl=9.0), figures(two, 79.0, p99=99.5)
    study = msgspec.structs.replace(
        study_of(missed, nowhere), frontier=(Cell(missed.job, other), Cell(nowhere.job, other[1:2]))
    )
    text = markdown(study)
    table = text[text.index("## Other settings there") :]
    assert "4096 blocks | `a` | 1.000 | 1.000 | 1.000 |  |" in table
    assert "4096 blocks | `router_decode_weight=1` | 0.988 | 0.990 | 1.000 | yes |" in table
    assert "4096 blocks | `router_decode_weight=2` | 0.875 | 1.000 | 1.125 |  |" in table
    assert "router_decode_weight=3" not in table, "another one is better in everything"
    assert "No setting holds all bars of: conversation, 5 times as fast, 4096 blocks." in table
    assert "## Other settings there" not in markdown(study_of(missed))


def test_the_page_in_the_repository_matches_its_data() -> None:
    study = msgspec.json.decode((RESULTS / "results" / "short.json").read_bytes(), type=Study)
    assert markdown(study) == (RESULTS / "README.md").read_text("utf-8")
