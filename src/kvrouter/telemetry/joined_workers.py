"""The workers that a process finds at its start: on a terminal one table instead of a line for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from kvrouter.telemetry.log_events import Event
from kvrouter.telemetry.log_forms import LogValue, cut, json_text
from kvrouter.telemetry.logs import HeldLine, LogOutput, log_output

IDS_SHOWN = 4
"""Runs of ids shown in one row; further ones are counted."""

_COLUMNS = {
    "model": "model",
    "domain": "place",
    "role": "role",
    "enforcement": "KV transfer",
    "taints": "taints",
    "state": "feed",
    "reason": "note",
}
"""The common values of a row's workers: the field of their log lines, and its column."""

_LIVE = "live"
_STARTING = frozenset(("recovering", _LIVE))
"""The states of a healthy feed of a worker that has just joined."""


class _Held:
    """Holds back lines of a terminal: that a worker joined, and that its feeds recover or are live. Any other
    line about the worker first releases its lines, so that the order stays.
    """

    def __init__(self, output: LogOutput) -> None:
        self._output = output
        self._lines: dict[LogValue, list[HeldLine]] = {}
        self._recovering: set[tuple[LogValue, LogValue]] = set()
        self._n_live = 0
        self._n_recovering = 0
        self._is_starting = True

    def holds_back(self, line: HeldLine) -> bool:
        """Return whether a line is not written now."""
        fields = line.fields
        worker, feed = fields.get("worker"), _feed_of(line)
        if self._is_starting:
            if line.event is Event.WORKER_JOINED or feed in _STARTING:
                self._lines.setdefault(worker, []).append(line)
                return True
            self._write(self._lines.pop(worker, ()))
            return False
        rank = (worker, fields.get("dp_rank"))
        if rank not in self._recovering:
            return False
        self._recovering.remove(rank)
        self._n_live += feed == _LIVE
        if not self._recovering:
            self._output.holds_back = None
            text = f"{self._n_live} of {self._n_recovering} feeds that were recovering are live\n"
            self._output.writer.write(text, is_urgent=True)
        return feed == _LIVE

    def show(self) -> None:
        """Write the table; from now on hold back only that a feed in it is live."""
        self._is_starting = False
        workers = []
        for worker, lines in self._lines.items():
            joined = next((each for each in lines if each.event is Event.WORKER_JOINED), None)
            if joined is None:
                self._write(lines)
                continue
            feeds = {each.fields["dp_rank"]: feed for each in lines if (feed := _feed_of(each))}
            self._recovering |= {(worker, rank) for rank, feed in feeds.items() if feed != _LIVE}
            workers.append({**joined.fields, "state": ",".join(sorted({*map(str, feeds.values())}))})
        self._n_recovering = len(self._recovering)
        self._lines = {}
        if workers:
            table = joined_table(workers, is_coloured=self._output.is_coloured)
            self._output.writer.write(table, is_urgent=True)
        if not self._recovering:
            self._output.holds_back = None

    def end(self) -> None:
        """Stop holding back, and write the lines of workers that no table had."""
        self._output.holds_back = None
        for lines in self._lines.values():
            self._write(lines)
        self._lines = {}

    def _write(self, lines: Sequence[HeldLine]) -> None:
        for line in lines:
            self._output.writer.write(line.text, is_urgent=False)


def _feed_of(line: HeldLine) -> LogValue:
    """Return the state of a feed that a line reports; None for any other line."""
    return line.fields.get("state") if line.event is Event.FEED_STATE else None


@contextmanager
def joined_as_table() -> Iterator[Callable[[], None]]:
    """Yield a function that writes the workers that joined until then, as one table.

    Only a terminal with text lines gets the table; other outputs get the lines at once. When the function is
    never called, because the start failed, the lines are written at the end.
    """
    output = log_output()
    if output is None or output.is_json or not output.is_terminal:
        yield lambda: None
        return
    held = _Held(output)
    output.holds_back = held.holds_back
    try:
        yield held.show
    finally:
        held.end()


def joined_table(workers: Sequence[Mapping[str, LogValue]], *, is_coloured: bool = False) -> str:
    """Return a table of workers, given as the fields of their lines, with a row for equal ones."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for worker in workers:
        alike = tuple(_cell(worker.get(field)) for field in _COLUMNS)
        rows.setdefault(alike, []).append(str(worker.get("worker")))
    shown = [at for at in range(len(_COLUMNS)) if any(alike[at] for alike in rows)]
    names = [*_COLUMNS.values()]
    table = [[*(names[at] for at in shown), "workers", "ids"]]
    for alike in sorted(rows):
        ids = rows[alike]
        table.append([*(alike[at] for at in shown), str(len(ids)), ids_text([*map(int, ids)])])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if name == "workers" else cell.ljust(width)
            for name, cell, width in zip(table[0], row, widths, strict=True)
        ).rstrip()
        for row in table
    ]
    if is_coloured:
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
    return "".join(f"{line}\n" for line in lines)


def _cell(value: LogValue) -> str:
    """Return a value safe for a terminal: workers may report any text."""
    text = str(cut(value or ""))
    return text if text.isprintable() else json_text(text)


def ids_text(ids: Sequence[int]) -> str:
    """Return ids with runs joined: ``1–3, 7``. ``ids`` must not be empty."""
    numbers = sorted(ids)
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    runs = [
        str(first) if first == last else f"{first}–{last}" for first, last in zip(starts, ends, strict=True)
    ]
    more = len(runs) - IDS_SHOWN
    return ", ".join(runs[:IDS_SHOWN]) + (f" and {more} more" if more > 0 else "")
