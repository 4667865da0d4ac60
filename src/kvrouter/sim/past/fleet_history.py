"""The history of a recorded fleet: its workers at the first request, and their changes."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from kvrouter.core.workers import Role
from kvrouter.recording.schema import FleetChange, FleetRecord, Worker


class RecordedWorker(NamedTuple):
    """A worker in a recording, and the file and line of its record."""

    worker: Worker
    path: Path
    line: int

    @property
    def place(self) -> str:
        """The file and line, as ``path:line``."""
        return f"{self.path}:{self.line}"


class Move(StrEnum):
    """A change of one worker."""

    JOINED = "joined"
    """It is new, or restarted: its cache is empty."""
    CHANGED = "changed"
    LEFT = "left"


class FleetMove(NamedTuple):
    """A worker's change, ``at_s`` seconds after the first request. One that left is in its last state."""

    at_s: float
    move: Move
    recorded: RecordedWorker


class FleetNote(NamedTuple):
    """A fleet record, in seconds of the Unix epoch; ``recording`` is that of its file's header."""

    recording: str
    at_s: float
    record: FleetRecord
    path: Path
    line: int


class Span(NamedTuple):
    """Seconds of the Unix epoch in which a recording had requests: first arrival, last end."""

    first_s: float
    last_s: float


class FleetHistory(NamedTuple):
    """The workers of ``model`` at the first request, by id, and their changes until the last one ended."""

    model: str
    block_size: int
    initial: Mapping[str, RecordedWorker]
    moves: tuple[FleetMove, ...]

    @property
    def recorded(self) -> list[RecordedWorker]:
        """All that is recorded of workers, in the order of time."""
        return [*self.initial.values(), *(move.recorded for move in self.moves)]


def fleet_history(
    notes: Sequence[FleetNote],
    spans: Mapping[str, Span],
    *,
    model: str,
    block_size: int,
    from_serving: bool = True,
) -> FleetHistory:
    """Return the history of one model's workers from ``notes``, which are in the order of the files.

    If the spans of several recordings overlap, the one that began last counts. ``from_serving``: a fleet
    without a worker that decodes at the first request starts when there is one.
    """
    from_s = min(span.first_s for span in spans.values())
    until_s = max(span.last_s for span in spans.values())
    initial: dict[str, RecordedWorker] = {}
    moves: list[FleetMove] = []
    for at_s, move, recorded in _combined(notes, spans, model):
        if at_s > until_s:
            break
        if at_s <= from_s or (from_serving and not (moves or _serves(initial))):
            _apply(initial, move, recorded)
        else:
            moves.append(FleetMove(at_s - from_s, move, recorded))
    return FleetHistory(model, block_size, initial, tuple(moves))


_Timed = tuple[float, Move, RecordedWorker]


class _Point(NamedTuple):
    """A moment of one recording, in the order in which moments are taken; without a move, the begin or the
    end of its span.
    """

    at_s: float
    order: int
    recording: str
    move: Move | None = None
    recorded: RecordedWorker | None = None


_MOVES, _BEGINS, _ENDS = range(3)


def _combined(notes: Sequence[FleetNote], spans: Mapping[str, Span], model: str) -> Iterator[_Timed]:
    """Yield every move of the fleet, in seconds of the Unix epoch, by the recording that speaks for it."""
    points: list[_Point] = []
    for recording, span in spans.items():
        own = [note for note in notes if note.recording == recording]
        points += (
            _Point(at_s, _MOVES, recording, move, recorded) for at_s, move, recorded in _moves_of(own, model)
        )
        points += (_Point(span.first_s, _BEGINS, recording), _Point(span.last_s, _ENDS, recording))
    points.sort(key=lambda point: point[:2])
    views: dict[str, dict[str, RecordedWorker]] = {recording: {} for recording in spans}
    shown: dict[str, RecordedWorker] = {}
    running: list[str] = []
    speaker = ""
    for point in points:
        if point.move is not None and point.recorded is not None:
            _apply(views[point.recording], point.move, point.recorded)
            if point.recording == speaker:
                _apply(shown, point.move, point.recorded)
                yield point.at_s, point.move, point.recorded
            continue
        if point.order == _BEGINS:
            running.append(point.recording)
        else:
            running.remove(point.recording)
        if running and running[-1] != speaker:
            speaker = running[-1]
            for move, recorded in _differences(shown, views[speaker]):
                yield point.at_s, move, recorded
            shown = dict(views[speaker])


def _moves_of(notes: Sequence[FleetNote], model: str) -> Iterator[_Timed]:
    """Yield the moves of one recording. Time never goes back: the fleet at the head of a file bears the
    moment of the file's first record, which may be a request's arrival.
    """
    view: dict[str, RecordedWorker] = {}
    of_head: set[str] = set()
    """Workers that the head of a file was the first to name: they join once more after it."""
    now_s = 0.0
    for note in notes:
        now_s = max(now_s, note.at_s)
        change = note.record.change
        found = [
            RecordedWorker(worker, note.path, note.line)
            for worker in note.record.workers
            if worker.model == model
        ]
        moves: list[tuple[Move, RecordedWorker]] = []
        if change is FleetChange.ALL:
            moves += _differences(view, {recorded.worker.worker: recorded for recorded in found})
            of_head |= {recorded.worker.worker for move, recorded in moves if move is Move.JOINED}
        for recorded in () if change is FleetChange.ALL else found:
            name = recorded.worker.worker
            if change is FleetChange.LEFT:
                moves += [(Move.LEFT, recorded)] if name in view else []
            elif change is FleetChange.JOINED and name not in of_head:
                moves.append((Move.JOINED, recorded))
            else:
                moves += _differences({name: view[name]} if name in view else {}, {name: recorded})
            of_head.discard(name)
        for move, recorded in moves:
            _apply(view, move, recorded)
            yield now_s, move, recorded


def _differences(
    before: Mapping[str, RecordedWorker], after: Mapping[str, RecordedWorker]
) -> list[tuple[Move, RecordedWorker]]:
    """Return what makes ``after`` of ``before``."""
    found = [(Move.LEFT, recorded) for name, recorded in before.items() if name not in after]
    for name, recorded in after.items():
        known = before.get(name)
        if known is None:
            found.append((Move.JOINED, recorded))
        elif known.worker != recorded.worker:
            found.append((Move.CHANGED, recorded))
    return found


def _serves(view: Mapping[str, RecordedWorker]) -> bool:
    return any(recorded.worker.role != Role.PREFILL for recorded in view.values())


def _apply(view: dict[str, RecordedWorker], move: Move, recorded: RecordedWorker) -> None:
    if move is Move.LEFT:
        view.pop(recorded.worker.worker, None)
    else:
        view[recorded.worker.worker] = recorded
