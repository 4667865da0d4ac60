"""An event of a timetable in words, as reports list it."""

from collections.abc import Mapping

import msgspec

from kvrouter.sim.timetable import (
    KINDS,
    AddEvent,
    LabelEvent,
    LinkEvent,
    PolicyEvent,
    TimetableEvent,
    WorkersEvent,
)


class TimetableEntry(msgspec.Struct, frozen=True):
    """``what`` happened to ``which`` workers, link or settings at ``at_s``, in seconds from the beginning.
    ``change`` is what it is or has from then on, "" where ``what`` says it all.
    """

    at_s: float
    what: str
    which: str
    change: str = ""


def entry_of(event: TimetableEvent) -> TimetableEntry:
    """Return the event in words."""
    which, change = _said(event)
    what = next(name for name, kind in KINDS.items() if type(event) is kind)
    return TimetableEntry(event.at_s, what, which, change)


def _said(event: TimetableEvent) -> tuple[str, str]:
    match event:
        case LabelEvent():
            labels = (
                f"no {level}" if label is None else f"{level}={label}" for level, label in event.set.items()
            )
            return _selected(event), ", ".join(labels)
        case WorkersEvent():
            return _selected(event), ""
        case LinkEvent():
            level = "" if event.level is None else f"{event.level} "
            return level + " – ".join(event.between), _link_change(event)
        case PolicyEvent():
            return ", ".join(event.set), ", ".join(_shown(value) for value in event.set.values())
        case AddEvent() if event.group is not None:
            return f"group {event.group}", _workers(event.replicas or 1)
        case AddEvent():
            names = ", ".join(group.name for group in event.workers)
            return f"group {names}", _workers(sum(group.n_workers for group in event.workers))
    return "", ""


def _selected(event: WorkersEvent) -> str:
    named = [] if event.group is None else [f"group {event.group}"]
    if event.worker is not None:
        named.append(f"worker {event.worker}")
    named += [f"{level}={value}" for level, value in event.domains.items()]
    return ", ".join(named) or "all workers"


def _link_change(event: LinkEvent) -> str:
    changes = (
        ("bandwidth × {:g}", event.bandwidth_factor),
        ("bandwidth {:g} bytes/s", event.bandwidth_bytes_per_s),
        ("latency × {:g}", event.latency_factor),
        ("latency {:g} s", event.latency_s),
    )
    return ", ".join(form.format(amount) for form, amount in changes if amount is not None)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _workers(n: int) -> str:
    return "1 worker more" if n == 1 else f"{n} workers more"
