"""``python -m benchmarks.replay``: replay the cases, and write the data and the page.

What is done is kept, so a run that was stopped goes on where it was.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.http_replay.machine import this_commit
from benchmarks.replay.cases import CASES
from benchmarks.replay.contest import Contest, Job, Replays, contest, our_points
from benchmarks.replay.fleets import MEMORY_TOKENS, SAME_LINKS, TIERS
from benchmarks.replay.kept import Head, KeptRun
from benchmarks.replay.page import PolicyStudy, markdown
from benchmarks.replay.zones import ZoneCell, ZoneJob, zone_cell, zone_jobs
from kvrouter.sim.replay.variant import OURS

HERE = Path(__file__).parent
SIZES = (8, 32)
SCENES = ((TIERS, 0.8), (SAME_LINKS, 0.8), (TIERS, 0.5))
"""Links, and shares of the load that round-robin sustains."""

MEMORIES = (MEMORY_TOKENS, MEMORY_TOKENS // 4, MEMORY_TOKENS // 8)
OURS_AS_GIVEN = (OURS, f"{OURS}:router_pd_selection=joint")


class Form(NamedTuple):
    """How much is replayed."""

    rows: int
    seeds: int
    cases: Sequence[int] = range(len(CASES))
    sizes: Sequence[int] = SIZES
    n_scenes: int = len(SCENES)


FORMS = {
    "check": Form(40, 2, cases=(4,), sizes=SIZES[:1], n_scenes=1),
    "quick": Form(200, 3, sizes=SIZES[:1]),
    "short": Form(800, 5),
    "long": Form(4_000, 5),
}


def jobs(form: Form) -> list[Job]:
    """Return every contest: in a closed loop, whose load is its own, over three sizes of memory instead."""
    found = []
    for case in form.cases:
        for size in form.sizes[::-1]:
            for kind, share in SCENES[: form.n_scenes]:
                if CASES[case].is_closed and share == SCENES[0][1]:
                    found += [Job(case, kind, size, each, share, form.rows, form.seeds) for each in MEMORIES]
                elif not CASES[case].is_closed:
                    found.append(Job(case, kind, size, MEMORY_TOKENS, share, form.rows, form.seeds))
    return found


def work(job: Job | ZoneJob) -> Contest | ZoneCell:
    """Do one job."""
    if isinstance(job, ZoneJob):
        return zone_cell(job)
    return contest(Replays(job), OURS_AS_GIVEN, our_points())


@click.command()
@click.option("--form", "name", type=click.Choice(list(FORMS)), default="short", show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=HERE, show_default=True)
def main(name: str, processes: int, output: Path) -> None:
    """Replay, and write the results and the page. Ctrl-C stops; the same command goes on."""
    form = FORMS[name]
    kept = KeptRun(output / "results" / f"{name}.kept", Head(name, form.rows, form.seeds, this_commit()))
    contests, zones = jobs(form), zone_jobs(form.rows, form.seeds)
    todo: list[Job | ZoneJob] = [*contests, *zones]
    kept.run(todo, work, processes)
    study = kept.study(PolicyStudy, zones=kept.found(zones, ZoneCell), contests=kept.found(contests, Contest))
    kept.write(study, output / "README.md", markdown(study))


if __name__ == "__main__":
    main()
