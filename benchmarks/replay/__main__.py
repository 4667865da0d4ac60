"""``python -m benchmarks.replay``: replay the cases, and write data, plots and the page."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from benchmarks.http_replay.machine import this_commit, this_machine
from benchmarks.replay.cases import CASES, RATIOS, Cell
from benchmarks.replay.measure import cell, jobs, zone_cells
from benchmarks.replay.page import Study, markdown, plot

HERE = Path(__file__).parent


class Form(NamedTuple):
    """How much is replayed."""

    rows: int
    seeds: int
    ratios: Sequence[float]
    cases: Sequence[int]
    n_loads: int


FORMS = {
    "quick": Form(1_000, 3, RATIOS, range(len(CASES)), 1),
    "short": Form(3_000, 5, RATIOS, range(len(CASES)), 3),
    "long": Form(20_000, 5, RATIOS, range(len(CASES)), 3),
}
"""On two cores: about ten minutes, two hours, a night."""


@click.command()
@click.option("--form", type=click.Choice(list(FORMS)), default="short", show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
def main(form: str, processes: int) -> None:
    """Replay, and write the results, the plots and the page."""
    chosen = FORMS[form]
    todo = jobs(chosen.rows, chosen.seeds, chosen.ratios, chosen.cases, chosen.n_loads)
    cells: list[Cell] = []
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(processes) as pool:
        task = progress.add_task("policies", total=len(todo))
        for done in pool.map(cell, todo):
            cells.append(done)
            progress.advance(task)
        zones = zone_cells(chosen.rows, chosen.seeds, lambda what: progress.update(task, description=what))
    study = Study(
        form,
        datetime.now(UTC).isoformat(timespec="seconds"),
        this_commit(),
        this_machine(),
        chosen.rows,
        chosen.seeds,
        tuple(zones),
        tuple(cells),
    )
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(study), indent=1)
    (results / f"{form}.json").write_bytes(data + b"\n")
    plots: list[str] = []
    for case in dict.fromkeys(each.case for each in cells):
        name = f"results/{form}-{case.replace(' ', '-')}.svg"
        (HERE / name).write_text(plot(case, [each for each in cells if each.case == case]) + "\n", "utf-8")
        plots.append(name)
    (HERE / "README.md").write_text(markdown(study, plots), encoding="utf-8")
    click.echo(f"written to {os.path.relpath(HERE / 'README.md')}")


if __name__ == "__main__":
    main()
