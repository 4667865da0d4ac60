"""``python -m benchmarks.replay``: replay the cases, and write data, plots and the pages.

What is done is kept, so a run that was stopped goes on where it was.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import active_children
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from benchmarks.http_replay.machine import Commit, this_commit, this_machine
from benchmarks.replay.cases import CASES, RATIOS
from benchmarks.replay.kept import Done, Head, KeptRun
from benchmarks.replay.page import Study, case_plot, markdown, tables, zones_plot
from benchmarks.replay.policies import Contest, Job, jobs
from benchmarks.replay.zones import ZoneJob, zone_cell, zone_jobs

HERE = Path(__file__).parent


class Form(NamedTuple):
    """How much is replayed."""

    rows: int
    seeds: int
    ratios: Sequence[float] = RATIOS
    cases: Sequence[int] = range(len(CASES))
    n_loads: int = 3


FORMS = {
    "check": Form(120, 2, ratios=RATIOS[::2], n_loads=1),
    "quick": Form(1_000, 3, n_loads=1),
    "short": Form(3_000, 5),
    "long": Form(20_000, 5),
}
"""On two cores: a minute, ten minutes, two hours, a night."""


def work(job: Job | ZoneJob) -> Done:
    """Do one job, in a process of its own."""
    begins_s = time.monotonic()
    if isinstance(job, ZoneJob):
        zone = zone_cell(job)
        return Done(job.key, time.monotonic() - begins_s, zones=(zone,))
    cells = Contest(job).cells()
    return Done(job.key, time.monotonic() - begins_s, cells=tuple(cells))


def leave_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def measure(todo: Sequence[Job | ZoneJob], kept: KeptRun, processes: int) -> None:
    """Do the jobs that are not done, and keep each one's figures. Raises KeyboardInterrupt when it is
    stopped; what is under way then is lost, what is done is kept.
    """
    open_jobs = [job for job in todo if job.key not in kept.done]
    if len(open_jobs) < len(todo):
        click.echo(f"{len(todo) - len(open_jobs)} of {len(todo)} jobs were done before", err=True)
    begins_s = time.monotonic()
    with ProcessPoolExecutor(processes, initializer=leave_interrupts) as pool:
        futures = [pool.submit(work, job) for job in open_jobs]
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                done = future.result()
                kept.add(done)
                left_s = (time.monotonic() - begins_s) / number * (len(open_jobs) - number)
                click.echo(
                    f"[{len(kept.done)}/{len(todo)}] {done.key}: {done.took_s:.0f} s; "
                    f"about {left_s / 60:.0f} min left",
                    err=True,
                )
        except KeyboardInterrupt:
            for child in active_children():
                child.terminate()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def write(study: Study, folder: Path) -> None:
    """Write data, plots and pages into ``folder``."""
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(study), indent=1)
    (results / f"{study.form}.json").write_bytes(data + b"\n")
    drawn = {f"{study.form}-zones": zones_plot(study.zones)}
    for case in dict.fromkeys(cell.case for cell in study.cells):
        of_case = [cell for cell in study.cells if cell.case == case]
        drawn[f"{study.form}-{case.replace(' ', '-')}"] = case_plot(case, of_case)
    plots: list[tuple[str, str]] = []
    for name, (title, svg) in drawn.items():
        (results / f"{name}.svg").write_text(f"{svg}\n", encoding="utf-8")
        plots.append((title, f"results/{name}.svg"))
    (results / f"{study.form}.md").write_text(tables(study), encoding="utf-8")
    (folder / "README.md").write_text(markdown(study, plots), encoding="utf-8")


def studied(name: str, commit: Commit, todo: Sequence[Job | ZoneJob], kept: KeptRun) -> Study:
    """Return what was measured, in the order of the jobs."""
    form, done = FORMS[name], [kept.done[job.key] for job in todo]
    return Study(
        form=name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=this_machine(),
        rows=form.rows,
        seeds=form.seeds,
        zones=tuple(zone for each in done for zone in each.zones),
        cells=tuple(cell for each in done for cell in each.cells),
    )


@click.command()
@click.option("--form", "name", type=click.Choice(list(FORMS)), default="short", show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=HERE, show_default=True)
def main(name: str, processes: int, output: Path) -> None:
    """Replay, and write the results, the plots and the pages. Ctrl-C stops; the same command goes on."""
    form, commit = FORMS[name], this_commit()
    (output / "results").mkdir(parents=True, exist_ok=True)
    kept = KeptRun(output / "results" / f"{name}.kept", Head(name, form.rows, form.seeds, commit))
    todo: list[Job | ZoneJob] = [*zone_jobs(form.rows, form.seeds)]
    todo += jobs(form.rows, form.seeds, form.ratios, form.cases, form.n_loads)
    try:
        measure(todo, kept, processes)
    except KeyboardInterrupt:
        click.echo(f"stopped after {len(kept.done)} of {len(todo)} jobs; the same command goes on", err=True)
        sys.exit(130)
    write(studied(name, commit, todo, kept), output)
    kept.remove()
    click.echo(f"written to {os.path.relpath(output / 'README.md')}")


if __name__ == "__main__":
    main()
