"""``python -m benchmarks.choice``: replay every cell of the bars, and write the data and the page."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from benchmarks.choice.aggregated import LOADS, Cell, Job, jobs, measured
from benchmarks.choice.page import Study, markdown
from benchmarks.http_replay.machine import this_commit, this_machine
from benchmarks.replay.cases import CASES

HERE = Path(__file__).parent


class Form(NamedTuple):
    """How much is replayed."""

    rows: int
    seeds: int
    cases: Sequence[int] = range(len(CASES))
    loads: Sequence[float] = LOADS


FORMS = {
    "check": Form(200, 2, cases=(0,), loads=LOADS[:1]),
    "short": Form(3_000, 10),
    "long": Form(20_000, 10),
}
"""On two cores: half a minute, half an hour, a night."""


def measure(todo: Sequence[Job], processes: int) -> list[Cell]:
    """Do every job, in processes of their own; return the cells in the order of the jobs."""
    begins_s = time.monotonic()
    found: dict[str, Cell] = {}
    with ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(measured, job) for job in todo]
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                cell = future.result()
                found[cell.job.key] = cell
                left_s = (time.monotonic() - begins_s) / number * (len(todo) - number)
                click.echo(
                    f"[{number}/{len(todo)}] {cell.job.key}; about {left_s / 60:.0f} min left", err=True
                )
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[job.key] for job in todo]


@click.command()
@click.option("--form", "name", type=click.Choice(list(FORMS)), default="short", show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=HERE, show_default=True)
def main(name: str, processes: int, output: Path) -> None:
    """Replay, and write the results and the page."""
    form = FORMS[name]
    cells = measure(jobs(form.rows, form.seeds, form.cases, form.loads), processes)
    study = Study(
        form=name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=this_commit(),
        machine=this_machine(),
        rows=form.rows,
        seeds=form.seeds,
        cells=tuple(cells),
    )
    results = output / "results"
    results.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(study), indent=1)
    (results / f"{name}.json").write_bytes(data + b"\n")
    (output / "README.md").write_text(markdown(study), encoding="utf-8")
    click.echo(f"written to {os.path.relpath(output / 'README.md')}")


if __name__ == "__main__":
    main()
