"""The changes of a recorded fleet as the events of a replay."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from kvrouter.core.ids import WorkerId
from kvrouter.recording.schema import Worker
from kvrouter.settings.problems import Path, Problem, config_error, problem_of
from kvrouter.sim.past.fleet_history import FleetHistory, FleetMove, Move, RecordedWorker
from kvrouter.sim.past.recorded_fleet import (
    Numbering,
    RecordedDocument,
    group_content,
    hardware_of,
    main_policy,
    policy_of,
)
from kvrouter.sim.replay.timetable import KINDS, TimetableEvent

_TIME_DIGITS = 6


class RecordedEvents(NamedTuple):
    """Events made of recorded changes; ``left_out`` counts, by kind, the changes without an event."""

    events: tuple[TimetableEvent, ...]
    left_out: Mapping[str, int]
    text: str
    """The events as a file; each names its recorded worker."""


def recorded_events(
    history: FleetHistory, numbering: Numbering, *, speedup: float, policies: bool
) -> RecordedEvents:
    """Return the changes as events, with times divided by ``speedup``; with ``policies`` also those of the
    transfer policy. Raises ConfigError, with file and line, for a change that an event cannot express.
    """
    translation = _Translation(history, numbering, policies=policies)
    for move in history.moves:
        translation.take(move)
    entries = translation.entries
    origins: dict[Path, RecordedWorker] = {
        ("events", at): move.recorded for at, (move, _) in enumerate(entries)
    }
    document = RecordedDocument("the recorded events", {}, origins)
    events: list[TimetableEvent] = []
    lines = ["events:" if entries else "events: []"]
    for position, (move, fields) in enumerate(entries):
        at_s = round(move.at_s / speedup, _TIME_DIGITS)
        kind = KINDS[fields["what"]]
        at: Path = ("events", position)
        try:
            event = kind.model_validate({"at_s": at_s} | {k: v for k, v in fields.items() if k != "what"})
        except ValidationError as error:
            found = [problem_of(item, kind) for item in error.errors()]
            problems = [Problem((*at, *problem.path), problem.must) for problem in found]
            raise config_error(problems, document.place) from error
        events.append(event.standing(document, at))
        shown = yaml.safe_dump(
            {"at_s": at_s} | fields, default_flow_style=True, sort_keys=False, width=10_000
        )
        lines.append(f"- {shown.strip()}  # worker {move.recorded.worker.worker}, {move.recorded.place}")
    return RecordedEvents(tuple(events), translation.left_out, "\n".join(lines) + "\n")


_ENTRY = tuple[FleetMove, dict[str, Any]]

_LEFT_OUT = ("role", "block_size", "context_length", "dp_size", "taints", "kv_blocks", "kv_bytes_per_token")
"""Fields of a running worker that a replay cannot change."""


class _Known:
    """A worker as the events so far have it. ``silent_at``: the event that it fell silent with."""

    __slots__ = ("here", "number", "silent_at", "worker")

    def __init__(self, number: WorkerId, worker: Worker) -> None:
        self.number = number
        self.worker = worker
        self.here = True
        self.silent_at: int | None = None


class _Translation:
    """Makes entries of an events file, one move after the other."""

    def __init__(self, history: FleetHistory, numbering: Numbering, *, policies: bool) -> None:
        self.entries: list[_ENTRY] = []
        self.left_out: Counter[str] = Counter()
        self._groups = numbering.groups
        self._kind_of = numbering.kind_of
        self._n_workers = numbering.n_workers
        self._with_policies = policies
        self._known = {
            name: _Known(numbering.numbers[name], recorded.worker)
            for name, recorded in history.initial.items()
        }
        self._policies = Counter(policy_of(known.worker) for known in self._known.values())
        self._policy = main_policy(self._policies)
        for recorded in history.initial.values():
            self._note_use(FleetMove(0.0, Move.JOINED, recorded), True)

    def take(self, move: FleetMove) -> None:
        """Let it happen."""
        match move.move:
            case Move.JOINED:
                self._join(move)
            case Move.CHANGED:
                self._change(move)
            case Move.LEFT:
                self._leave(move)
        self._note_policy(move)

    def _join(self, move: FleetMove) -> None:
        worker = move.recorded.worker
        known = self._known.get(worker.worker)
        if known is not None and known.here:
            self._leave(move)
        if known is None or hardware_of(known.worker) != hardware_of(worker):
            self._n_workers += 1
            known = self._known[worker.worker] = _Known(WorkerId(self._n_workers), worker)
            group = self._groups.get(self._kind_of(worker))
            added = {"workers": [group_content(worker, f"joined-{self._n_workers}")]}
            self._add(move, "add", added if group is None else {"group": group})
        else:
            self._label(move, known)
            self._add(move, "join", {"worker": int(known.number)})
            known.worker, known.here, known.silent_at = worker, True, None
        self._policies[policy_of(worker)] += 1
        self._note_use(move, True)

    def _change(self, move: FleetMove) -> None:
        worker = move.recorded.worker
        known = self._known[worker.worker]
        was_used = _takes_requests(known.worker)
        self._label(move, known)
        for field in _LEFT_OUT:
            if field != "taints" and getattr(known.worker, field) != getattr(worker, field):
                self.left_out[field] += 1
        if hardware_of(known.worker)[2] != hardware_of(worker)[2]:
            self.left_out["taints"] += 1
        self._policies[policy_of(known.worker)] -= 1
        self._policies[policy_of(worker)] += 1
        known.worker = worker
        self._note_use(move, was_used)

    def _leave(self, move: FleetMove) -> None:
        known = self._known[move.recorded.worker.worker]
        known.here = False
        self._policies[policy_of(known.worker)] -= 1
        if known.silent_at is None:
            self._add(move, "die", {"worker": int(known.number)})
        else:  # it was dead since then, as nobody heard of it again
            fell_silent, fields = self.entries[known.silent_at]
            self.entries[known.silent_at] = (fell_silent, {**fields, "what": "die"})
            known.silent_at = None

    def _label(self, move: FleetMove, known: _Known) -> None:
        before, after = known.worker.domains, move.recorded.worker.domains
        labels: dict[str, str | None] = {level: None for level in before if level not in after}
        labels |= {level: value for level, value in after.items() if before.get(level) != value}
        if labels:
            self._add(move, "label", {"worker": int(known.number), "set": labels})

    def _note_use(self, move: FleetMove, was_used: bool) -> None:
        """Drain a worker that takes no new requests, and undo that when it takes them again."""
        worker = move.recorded.worker
        known = self._known[worker.worker]
        if was_used and not _takes_requests(worker):
            if not worker.alive:
                known.silent_at = len(self.entries)
            self._add(move, "drain", {"worker": int(known.number)})
        elif not was_used and _takes_requests(worker):
            self._add(move, "join", {"worker": int(known.number)})
        if worker.alive:
            known.silent_at = None

    def _note_policy(self, move: FleetMove) -> None:
        """The fleet's policy is what most workers have; one that changes takes them through in turn."""
        self._policies = +self._policies
        now = main_policy(self._policies)
        if now == self._policy or not self._policies:
            return
        if self._policies[now] == self._policies[self._policy]:
            return
        self._policy = now
        if self._with_policies:
            self._add(move, "policy", {"set": {"kv_transfer": None if now is None else now.content}})
        else:
            self.left_out["transfer policy"] += 1

    def _add(self, move: FleetMove, what: str, fields: Mapping[str, Any]) -> None:
        self.entries.append((move, {"what": what, **fields}))


def _takes_requests(worker: Worker) -> bool:
    return worker.alive and not (worker.draining or worker.engine_silent)
