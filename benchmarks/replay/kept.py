"""What a run has measured so far, kept in a file, so that one that was stopped goes on where it was."""

from pathlib import Path

import msgspec

from benchmarks.http_replay.machine import Commit
from benchmarks.replay.cases import Cell, ZoneCell


class Head(msgspec.Struct, frozen=True):
    """What is measured with what: figures of another head are of another run."""

    form: str
    rows: int
    seeds: int
    commit: Commit


class Done(msgspec.Struct, frozen=True):
    """One job that was done: its key, how long it took, and its figures."""

    key: str
    took_s: float
    cells: tuple[Cell, ...] = ()
    zones: tuple[ZoneCell, ...] = ()


class KeptRun:
    """The jobs that are done, in a file of JSON lines with the head first."""

    def __init__(self, path: Path, head: Head) -> None:
        self._path = path
        self.done = _read(path, head)
        """By key; those of a run with another head are forgotten."""
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
