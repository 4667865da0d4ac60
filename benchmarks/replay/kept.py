"""A run of many replays: its jobs, done in processes of their own and kept in a file, so that a run that was
stopped goes on where it was; and what its data begin with.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import active_children
from pathlib import Path
from typing import Protocol, TypeVar

import click
import msgspec

from benchmarks.http_replay.machine import Commit, Machine, this_machine


class Head(msgspec.Struct, frozen=True):
    """What is measured with what: figures of another head are of another run."""

    form: str
    rows: int
    seeds: int
    commit: Commit


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What the data of a run begin with."""

    form: str
    measured_at: str
    commit: Commit
    machine: Machine
    rows: int
    seeds: int

    @property
    def origin(self) -> str:
        """What the figures were measured with, for the page."""
        return (
            f"commit {self.commit.id}{' with changes' * self.commit.changed}, {self.machine.cpu}, "
            f"{self.machine.cores} cores"
        )


class Done(msgspec.Struct, frozen=True):
    """One job that was done: its key, how much processor time it took, and what came of it."""

    key: str
    cpu_s: float
    found: msgspec.Raw


class Job(Protocol):
    """What is replayed at once, with one process."""

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        ...


Todo = TypeVar("Todo", bound=Job)
Found = TypeVar("Found")
AnyStudy = TypeVar("AnyStudy", bound=Study)


class KeptRun:
    """The jobs that are done, in a file of JSON lines with the head first."""

    def __init__(self, path: Path, head: Head) -> None:
        self._path, self.head = path, head
        self.done = _read(path, head)
        """By key; those of a run with another head are forgotten."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [msgspec.json.encode(line) + b"\n" for line in (head, *self.done.values())]
        new = path.with_suffix(".new")
        new.write_bytes(b"".join(lines))
        new.replace(path)

    def add(self, done: Done) -> None:
        """Keep one job more."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(done) + b"\n")
        self.done[done.key] = done

    def remove(self) -> None:
        """Forget the run: its results are written."""
        self._path.unlink(missing_ok=True)

    def run(self, todo: Sequence[Todo], do: Callable[[Todo], object], processes: int) -> None:
        """Do the jobs that are not done, and keep what comes of each. Ends the program when it is stopped:
        what is under way then is lost, what is done is kept.
        """
        open_jobs = [job for job in todo if job.key not in self.done]
        if len(open_jobs) < len(todo):
            click.echo(f"{len(todo) - len(open_jobs)} of {len(todo)} jobs were done before", err=True)
        begins_s = time.monotonic()
        with ProcessPoolExecutor(processes, initializer=_leave_interrupts) as pool:
            futures = [pool.submit(_done, do, job) for job in open_jobs]
            try:
                for number, future in enumerate(as_completed(futures), start=1):
                    done = future.result()
                    self.add(done)
                    left_s = (time.monotonic() - begins_s) / number * (len(open_jobs) - number)
                    click.echo(
                        f"[{len(todo) - len(open_jobs) + number}/{len(todo)}] {done.key}: "
                        f"{done.cpu_s:.0f} s of CPU; about {left_s / 60:.0f} min left",
                        err=True,
                    )
            except KeyboardInterrupt:
                for child in active_children():
                    child.terminate()
                click.echo("stopped; the same command goes on where it was", err=True)
                sys.exit(130)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def found(self, todo: Sequence[Job], kind: type[Found]) -> tuple[Found, ...]:
        """Return what came of these jobs, in their order."""
        return tuple(msgspec.json.decode(self.done[job.key].found, type=kind) for job in todo)

    def study(self, kind: type[AnyStudy], **of: object) -> AnyStudy:
        """Return the data of the run."""
        return kind(
            form=self.head.form,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=self.head.commit,
            machine=this_machine(),
            rows=self.head.rows,
            seeds=self.head.seeds,
            **of,
        )

    def write(self, study: Study, page: Path, text: str) -> None:
        """Write the data next to where they were kept, and the page; the run is over."""
        data = msgspec.json.format(msgspec.json.encode(study), indent=1)
        self._path.with_suffix(".json").write_bytes(data + b"\n")
        page.write_text(text, encoding="utf-8")
        self.remove()
        click.echo(f"written to {os.path.relpath(page)}")


def _done(do: Callable[[Todo], object], job: Todo) -> Done:
    """Do one job, in a process of its own."""
    begins_s = time.process_time()
    found = msgspec.json.encode(do(job))
    return Done(job.key, time.process_time() - begins_s, msgspec.Raw(found))


def _leave_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read(path: Path, head: Head) -> dict[str, Done]:
    if not path.exists():
        return {}
    first, *lines = path.read_bytes().split(b"\n")
    try:
        if msgspec.json.decode(first, type=Head) != head:
            return {}
        # what follows the last line break was cut off in mid-write
        found = [msgspec.json.decode(line, type=Done) for line in lines[:-1]]
    except msgspec.DecodeError:
        return {}
    return {done.key: done for done in found}
