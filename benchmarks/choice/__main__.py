"""``python -m benchmarks.choice``: replay every cell of the bars, and write the data and the pages.

What is done is kept, so a run that was stopped goes on where it was.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.choice import aggregated, page, pairs, pairs_page
from benchmarks.choice.page import CostStudy
from benchmarks.choice.pairs import PairCell
from benchmarks.choice.pairs_page import PairStudy
from benchmarks.http_replay.machine import this_commit
from benchmarks.replay.cases import CASES
from benchmarks.replay.contest import Contest
from benchmarks.replay.kept import Head, KeptRun

HERE = Path(__file__).parent
COSTS, PAIRS = "costs", "pairs"


class Form(NamedTuple):
    """How much is replayed."""

    rows: int
    seeds: int
    cases: Sequence[int] = range(len(CASES))
    sizes: Sequence[int] = aggregated.SIZES
    n_scenes: int = len(aggregated.SCENES)


FORMS = {
    "check": Form(40, 2, cases=(0,), sizes=aggregated.SIZES[:1], n_scenes=1),
    "quick": Form(200, 3, sizes=aggregated.SIZES[:1]),
    "short": Form(1_000, 5),
    "long": Form(4_000, 5),
}


@click.command()
@click.option("--form", "name", type=click.Choice(list(FORMS)), default="short", show_default=True)
@click.option(
    "--part",
    "parts",
    type=click.Choice([COSTS, PAIRS]),
    multiple=True,
    default=[COSTS, PAIRS],
    show_default=True,
)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=HERE, show_default=True)
def main(name: str, parts: Sequence[str], processes: int, output: Path) -> None:
    """Replay, and write the results and the pages. Ctrl-C stops; the same command goes on."""
    form, commit = FORMS[name], this_commit()  # before a page is written, which is a change
    head = Head(name, form.rows, form.seeds, commit)
    if COSTS in parts:
        costs = KeptRun(output / "results" / f"{name}.kept", head)
        contests = aggregated.jobs(form.rows, form.seeds, form.cases, form.sizes, form.n_scenes)
        costs.run(contests, aggregated.measured, processes)
        study = costs.study(CostStudy, contests=costs.found(contests, Contest))
        costs.write(study, output / "README.md", page.markdown(study))
    if PAIRS in parts:
        of_pairs = KeptRun(output / "results" / f"pairs-{name}.kept", head)
        todo = pairs.jobs(form.rows, form.seeds, form.cases)
        of_pairs.run(todo, pairs.measured, processes)
        cells = tuple(cell for found in of_pairs.found(todo, list[PairCell]) for cell in found)
        pair_study = of_pairs.study(PairStudy, cells=cells)
        of_pairs.write(pair_study, output / "pairs.md", pairs_page.markdown(pair_study))


if __name__ == "__main__":
    main()
