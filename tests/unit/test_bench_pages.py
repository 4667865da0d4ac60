"""The tables of figures in the pages: printed from the result files that they name, not written by hand."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.http_replay.result import Report
from benchmarks.http_replay.table import markdown_of_runs as replays_of_runs
from benchmarks.markdown import markdown_of_runs
from benchmarks.results import RESULTS, read_result

ROOT = Path(__file__).parents[2]
COMMIT = "552b729eb124"
RUNS = ("", "-2", "-3")


def replays() -> list[Report]:
    paths = [RESULTS / f"replay-sample-{COMMIT}{run}.json" for run in RUNS]
    return [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]


def test_the_page_of_benchmarks_has_the_table_of_its_runs() -> None:
    runs = [read_result(RESULTS / f"peers-{COMMIT}{run}.json") for run in RUNS]
    assert markdown_of_runs(runs) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_readme_has_the_table_of_its_replays() -> None:
    assert replays_of_runs(replays()) in (ROOT / "README.md").read_text()


def test_runs_of_other_rows_are_no_spread() -> None:
    first, second, _ = replays()
    with pytest.raises(ValueError, match="the same rows"):
        replays_of_runs([first, msgspec.structs.replace(second, rows=299)])
