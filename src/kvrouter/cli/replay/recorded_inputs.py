"""A recording's inputs for a replay besides its requests: its fleet, and the changes of that."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.text import Text

from kvrouter.app.atomic_file import write_atomic
from kvrouter.cli.console import error_console
from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import Document, parse_document, read_document
from kvrouter.sim.past.fleet_history import FleetHistory
from kvrouter.sim.past.recorded_events import RecordedEvents, recorded_events
from kvrouter.sim.past.recorded_fleet import Numbering, RecordedFleet, initial_policy, match, recorded_fleet
from kvrouter.sim.replay.timetable import TimetableEvent
from kvrouter.sim.replay.variant import DEFAULT_FLEET
from kvrouter.sim.traces.read import Trace
from kvrouter.sim.traces.recorded_trace import Past, Recording

RECORDED = Path("recorded")
"""In place of an events file: the recorded changes, or an error if they cannot be applied."""

NONE = Path("none")
"""In place of an events file: no changes, even if some were recorded."""


class ReplayedFleet(NamedTuple):
    """The fleet file of a replay; ``recorded`` if it was made of the recording. ``notes`` say
    where it is from, if it was not named.
    """

    document: Document
    recorded: RecordedFleet | None = None
    notes: tuple[str, ...] = ()


class RecordedChanges(NamedTuple):
    """The events of a recording, and notes for readers of the figures."""

    events: tuple[TimetableEvent, ...] = ()
    notes: tuple[str, ...] = ()
    text: str | None = None
    """The events as a file; None where they have no meaning for the fleet."""


NO_CHANGES = RecordedChanges()


def open_past(path: Path, model: str | None) -> Past:
    """Return the whole recording of one model; warnings about missing parts go to standard error.

    Raises ConfigError if it is no recording of the model.
    """
    return Recording(path, model=model, warn=warn_reader).past()


def warn_reader(what: str) -> None:
    """Print on standard error what the figures of a command leave out."""
    error_console().print(Text(f"warning: {what}"), soft_wrap=True)


def replayed_fleet(fleet: Path | None, trace: Trace, trace_path: Path) -> ReplayedFleet:
    """Return the fleet that was named, else the recorded one, else the default. Raises ConfigError."""
    if fleet is not None:
        return ReplayedFleet(read_document(fleet))
    if trace.fleet is None or not trace.fleet.initial:
        why = "no --fleet" if trace.fleet is None else "the recording names no workers"
        note = f"{why}: the fleet is 8 aggregated mock workers of the default size"
        return ReplayedFleet(parse_document(DEFAULT_FLEET, "the default fleet"), notes=(note,))
    made = recorded_fleet(trace.fleet, str(trace_path))
    note = f"the fleet is the recorded one, as mock engines: {_counted(made.numbering.n_workers, 'worker')}"
    return ReplayedFleet(made.document, made, (note,))


def recorded_changes(
    history: FleetHistory | None,
    recorded: RecordedFleet | None,
    fleets: Sequence[FleetFile],
    *,
    events: Path | None,
    speedup: float,
) -> RecordedChanges:
    """Return the recorded changes that happen to ``fleets``, all of which must have the recorded workers.

    ``events`` is the option in place of an events file. Raises ConfigError if the changes were asked for and
    cannot be applied.
    """
    insists = events == RECORDED
    if history is None:
        if insists:
            raise ConfigError("events: only a recording has recorded changes of its fleet", param="events")
        return RecordedChanges()
    numbering, mismatch = _numbering(history, recorded, fleets)
    shown = _counted(len(history.moves), "recorded change")
    if numbering is None:
        if insists:
            raise ConfigError(f"events: {shown} cannot happen to this fleet: {mismatch}", param="events")
        notes = (f"{shown} of the fleet not applied: {mismatch}",) if history.moves and events is None else ()
        return RecordedChanges(notes=notes)
    policies = all(_has_recorded_policy(history, fleet) for fleet in fleets)
    found = recorded_events(history, numbering, speedup=speedup, policies=policies)
    if events not in (None, RECORDED):
        notes = (f"{shown} of the fleet not applied: --events says what happens",) if history.moves else ()
        return RecordedChanges(notes=notes, text=found.text)
    return RecordedChanges(found.events, _notes(found), found.text)


def write_recorded(
    fleet: RecordedFleet | None, changes: RecordedChanges, *, fleet_to: Path | None, events_to: Path | None
) -> None:
    """Write the recorded fleet and its changes if that is asked for. Raises ConfigError, before any output,
    if there are none.
    """
    files: list[tuple[Path, str]] = []
    if fleet_to is not None:
        if fleet is None:
            raise ConfigError(
                "write-fleet: only a recording that is replayed without --fleet has a fleet to write",
                param="write-fleet",
            )
        text = yaml.safe_dump(dict(fleet.document.content), sort_keys=False, default_flow_style=None)
        files.append((fleet_to, text))
    if events_to is not None:
        if changes.text is None:
            why = f": {changes.notes[0]}" if changes.notes else ": the trace is no recording of this fleet"
            raise ConfigError(f"write-events: there is nothing to write{why}", param="write-events")
        files.append((events_to, changes.text))
    for path, text in files:
        write_atomic(path, text.encode())


def _numbering(
    history: FleetHistory, recorded: RecordedFleet | None, fleets: Sequence[FleetFile]
) -> tuple[Numbering | None, str]:
    """Return the recorded workers' ids in all of ``fleets``, or why they do not match."""
    first: Numbering | None = None
    for fleet in fleets:
        found, mismatch = match(history, fleet)
        if found is None:
            return None, mismatch
        first = first or found
        if found.numbers != first.numbers:
            return None, "the fleets that are compared have different workers"
    return first if recorded is None else recorded.numbering, ""


def _has_recorded_policy(history: FleetHistory, fleet: FleetFile) -> bool:
    policy, spec = initial_policy(history), fleet.kv_transfer
    if policy is None or spec is None:
        return policy is None and spec is None
    return policy == (spec.domain, spec.enforcement.value, spec.preferred_weight)


def _notes(found: RecordedEvents) -> tuple[str, ...]:
    notes = []
    if found.events:
        notes.append(f"{_counted(len(found.events), 'recorded change')} of the fleet applied")
    if found.left_out:
        listed = ", ".join(f"{count} of {what}" for what, count in found.left_out.items())
        notes.append(f"recorded changes that this replay does not make: {listed}")
    return tuple(notes)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
