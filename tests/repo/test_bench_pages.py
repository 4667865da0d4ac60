"""The tables of figures in the pages: printed from the result files that they name, not written by hand."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.choice import live_page, pairs_page
from benchmarks.choice import page as cost_page
from benchmarks.choice.live_page import FALLEN, LiveRequest, LiveRun, LiveStudy, SaidOfLink
from benchmarks.choice.page import CostStudy
from benchmarks.choice.pairs_page import PairStudy
from benchmarks.http_replay.result import Report
from benchmarks.http_replay.table import markdown_of_runs as replays_of_runs
from benchmarks.markdown import markdown_of_runs
from benchmarks.replay import page as policy_page
from benchmarks.replay.page import PolicyStudy
from benchmarks.results import RESULTS, read_result

ROOT = Path(__file__).parents[2]
PEERS_COMMIT = "985823d2f0f6"
REPLAYS_COMMIT = "552b729eb124"
RUNS = ("", "-2", "-3")


def replays() -> list[Report]:
    paths = [RESULTS / f"replay-sample-{REPLAYS_COMMIT}{run}.json" for run in RUNS]
    return [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]


def test_the_benchmarks_page_has_the_table_of_its_runs() -> None:
    runs = [read_result(RESULTS / f"peers-{PEERS_COMMIT}{run}.json") for run in RUNS]
    assert markdown_of_runs(runs) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_benchmarks_page_has_the_table_of_its_replays() -> None:
    assert replays_of_runs(replays()) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_page_of_policies_is_that_of_its_data() -> None:
    folder = ROOT / "benchmarks" / "replay"
    study = msgspec.json.decode((folder / "results" / "short.json").read_bytes(), type=PolicyStudy)
    assert policy_page.markdown(study) == (folder / "README.md").read_text()


def test_the_page_of_costs_is_that_of_its_data() -> None:
    folder = ROOT / "benchmarks" / "choice"
    study = msgspec.json.decode((folder / "results" / "short.json").read_bytes(), type=CostStudy)
    assert cost_page.markdown(study) == (folder / "README.md").read_text()


def test_the_page_of_pairs_is_that_of_its_data() -> None:
    folder = ROOT / "benchmarks" / "choice"
    study = msgspec.json.decode((folder / "results" / "pairs-short.json").read_bytes(), type=PairStudy)
    assert pairs_page.markdown(study) == (folder / "pairs.md").read_text()


@pytest.mark.parametrize("folder", ["choice", "replay"])
def test_the_bars_of_both_pages_are_listed_with_what_bounds_them(folder: str) -> None:
    page = (ROOT / "benchmarks" / folder / "README.md").read_text()
    table = page.partition("## Bars over the whole table")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    listed = (ROOT / "docs" / "decisions" / "0018-what-replays-of-choices-show.md").read_text()
    column = ("choice", "replay").index(folder) + 2
    for wanted, measured, holds in rows:
        (row,) = (row for row in listed.splitlines() if row.startswith(f"| {wanted} |"))
        cell = row.split(" | ")[column - 1]
        assert measured in cell
        assert ("missed" in cell) == ("no" in holds)


def test_runs_of_different_rows_are_not_combined() -> None:
    first, second, _ = replays()
    with pytest.raises(ValueError, match="the same rows"):
        replays_of_runs([first, msgspec.structs.replace(second, rows=299)])


def test_the_falling_link_page_matches_its_recorded_requests() -> None:
    folder = ROOT / "benchmarks" / "choice"
    study = msgspec.json.decode((folder / "results" / "live.json").read_bytes(), type=LiveStudy)
    assert tuple(live_page.summary(run, study.phase_s) for run in study.runs) == study.summaries
    assert live_page.markdown(study) == (folder / "live.md").read_text()


def test_a_link_is_left_for_good_only_after_its_last_traffic() -> None:
    """Every other transfer goes over the link, but for 6 to 9 s and from 14 s on after it fell at 30."""

    def over_the_link(at_s: float) -> bool:
        return not (36.0 <= at_s < 39.0 or 44.0 <= at_s < 60.0)

    requests = [
        LiveRequest(
            at_s=at / 10,
            late_s=0.0,
            prompt_tokens=1000,
            route=FALLEN if at % 2 and over_the_link(at / 10) else "b to b",
            ttft_s=0.1,
        )
        for at in range(900)
    ]
    said = [
        SaidOfLink(30.0, "mock_link_changed", ""),
        SaidOfLink(31.5, "link_slow", ""),
        SaidOfLink(60.0, "mock_link_changed", ""),
        SaidOfLink(62.0, "link_well", ""),
    ]
    run = LiveRun(policy="p", flags="", load_before=0.0, said=tuple(said), requests=tuple(requests))
    found = live_page.summary(run, 30.0)
    assert (found.left_after_s, found.left_for_good_after_s) == (5.75, 13.75)
    assert (found.slow_after_s, found.well_after_s, found.slow_lines) == (1.5, 2.0, 1)
    assert [phase.fallen_share for phase in found.phases] == [0.5, 0.183, 0.5]
