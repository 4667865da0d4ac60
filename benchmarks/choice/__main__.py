"""``python -m benchmarks.choice``: replay every cell of the bars, and write the data and the page."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import click
import msgspec

from benchmarks.choice import pairs, pairs_page
from benchmarks.choice.aggregated import LOADS, Job, frontier, jobs, measured
from benchmarks.choice.page import Study, markdown, row_of
from benchmarks.choice.pairs import AGGREGATED, PairJob
from benchmarks.choice.pairs_page import PairStudy
from benchmarks.http_replay.machine import this_commit, this_machine
from benchmarks.replay.cases import CASES

HERE = Path(__file__).parent
PARTS = (AGGREGATED, "pairs")


class Form(NamedTuple):
    """How much is replayed."""

    rows: int
    seeds: int
    cases: Sequence[int] = range(len(CASES))
    loads: Sequence[float] = LOADS


FORMS = {
    "check": Form(200, 2, cases=(0,), loads=LOADS[:1]),
    "short": Form(2_000, 10),
    "long": Form(20_000, 10),
}
"""On two cores: half a minute, half an hour, a night."""


Todo = TypeVar("Todo", Job, PairJob)
Found = TypeVar("Found")


def measure(todo: Sequence[Todo], do: Callable[[Todo], Found], processes: int) -> list[Found]:
    """Do every job, in processes of their own; return what came of them in the order of the jobs."""
    begins_s = time.monotonic()
    found: dict[str, Found] = {}
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(do, job): job for job in todo}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                key = futures[future].key
                found[key] = future.result()
                left_s = (time.monotonic() - begins_s) / number * (len(todo) - number)
                click.echo(f"[{number}/{len(todo)}] {key}; about {left_s / 60:.0f} min left", err=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[job.key] for job in todo]


@click.command()
@click.option("--form", "name", type=click.Choice(list(FORMS)), default="short", show_default=True)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=HERE, show_default=True)
def main(name: str, parts: Sequence[str], processes: int, output: Path) -> None:
    """Replay, and write the results and the pages."""
    form, commit = FORMS[name], this_commit()  # before a page is written, which is a change
    results = output / "results"
    results.mkdir(parents=True, exist_ok=True)
    for part in parts:
        study: Study | PairStudy
        if part == AGGREGATED:
            todo = jobs(form.rows, form.seeds, form.cases, form.loads)
            cells = tuple(measure(todo, measured, processes))
            missed = [cell.job for cell in cells if row_of(cell).missed]
            tried = tuple(measure(missed, frontier, processes))
            study = Study(name, _now(), commit, this_machine(), form.rows, form.seeds, cells, tried)
            page, data, text = "README.md", f"{name}.json", markdown(study)
        else:
            found = measure(pairs.jobs(form.rows, form.seeds, form.cases), pairs.measured, processes)
            of_pairs = tuple(cell for study_cells in found for cell in study_cells)
            study = PairStudy(name, _now(), commit, this_machine(), form.rows, form.seeds, of_pairs)
            page, data, text = "pairs.md", f"pairs-{name}.json", pairs_page.markdown(study)
        written = msgspec.json.format(msgspec.json.encode(study), indent=1)
        (results / data).write_bytes(written + b"\n")
        (output / page).write_text(text, encoding="utf-8")
        click.echo(f"written to {os.path.relpath(output / page)}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
