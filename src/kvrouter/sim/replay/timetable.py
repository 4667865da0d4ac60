"""Changes of a fleet during a replay: workers die, drain, come back, are added and get other labels; links
and policies change.
"""

from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Annotated, Self

import msgspec
from annotated_types import Interval, MaxLen, MinLen
from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WORKER_IDS, WorkerId
from kvrouter.fleetfile.fleet_file import REPLICAS_MAX, DomainName, DomainValue, Name, WorkerGroup
from kvrouter.settings.problems import (
    Document,
    Path,
    Problem,
    config_error,
    did_you_mean,
    dotted,
    problem_of,
    raise_problems,
    read_document,
)
from kvrouter.settings.setting import Finite, FleetPart, NonNegative, Positive, Whole

BandwidthFactor = Annotated[Finite, Interval(ge=1e-6, le=1e6)]
LatencyFactor = Annotated[Finite, Interval(ge=0, le=1e6)]


class TimetableEntry(msgspec.Struct, frozen=True):
    """An event in words: ``what`` happened to ``which`` workers, link or settings at ``at_s``, in seconds
    from the beginning. ``change`` is the new state, "" if ``what`` states it.
    """

    at_s: float
    what: str
    which: str
    change: str = ""


class TimetableEvent(FleetPart):
    """Something that happens ``at_s`` seconds after the beginning."""

    at_s: Annotated[Finite, Interval(ge=0, le=1e9)]

    _place: Callable[[Path], str] = PrivateAttr(default_factory=lambda: dotted)

    def standing(self, document: Document, at: Path) -> Self:
        """Return it as the event at this path of a file."""
        self._place = lambda path: document.place((*at, *path))
        return self

    def wrong(self, *problems: Problem) -> ConfigError:
        """Return the error for an impossible event: paths are those of its own fields."""
        return config_error(problems, self._place)

    def described(self) -> tuple[str, str]:
        """Return its object and its new state in words."""
        return "", ""


class WorkersEvent(TimetableEvent):
    """It happens to the workers of ``group`` that are in all of ``domains``, or to the one with the number
    ``worker``; without any of these to all.
    """

    worker: Annotated[Whole, Interval(ge=1, lt=WORKER_IDS)] | None = None
    """Workers are numbered from 1 in the order of the fleet file; those that are added count on."""

    group: Name | None = None
    domains: Mapping[DomainName, DomainValue] = {}

    def selects(self, worker_id: WorkerId, group: WorkerGroup) -> bool:
        """Whether it happens to this worker, which is of this group, with these domains."""
        return (
            self.worker in (None, worker_id)
            and self.group in (None, group.name)
            and self.domains.items() <= group.domains.items()
        )

    def described(self) -> tuple[str, str]:
        """Return the workers in words."""
        named = [] if self.group is None else [f"group {self.group}"]
        if self.worker is not None:
            named.append(f"worker {self.worker}")
        named += [f"{level}={value}" for level, value in self.domains.items()]
        return ", ".join(named) or "all workers", ""


class DieEvent(WorkersEvent):
    """They are gone at once, with their KV and their requests."""


class DrainEvent(WorkersEvent):
    """They get no new requests; those that they have go on, and their KV stays."""


class JoinEvent(WorkersEvent):
    """Those that died come back, with empty caches; those that drain get new requests again."""


class LabelEvent(WorkersEvent):
    """Their nodes' labels change: ``set`` has new values of levels, None takes one away."""

    set: Annotated[Mapping[DomainName, DomainValue | None], MinLen(1)]

    def described(self) -> tuple[str, str]:
        """Return the workers and the new labels in words."""
        labels = (f"no {level}" if label is None else f"{level}={label}" for level, label in self.set.items())
        return super().described()[0], ", ".join(labels)


class LinkEvent(TimetableEvent):
    """The link between two values of ``level`` changes, in both directions, also for transfers in flight.

    Factors are of the values in the fleet file. ``level`` may be left out: that of the transfer policy, else
    the broadest.
    """

    between: Annotated[tuple[DomainValue, ...], MinLen(2), MaxLen(2)]
    level: DomainName | None = None
    bandwidth_factor: BandwidthFactor | None = None
    bandwidth_bytes_per_s: Positive | None = None
    latency_factor: LatencyFactor | None = None
    latency_s: NonNegative | None = None

    @model_validator(mode="after")
    def _says_what_becomes_of_it(self) -> Self:
        pairs = (("bandwidth_bytes_per_s", "bandwidth_factor"), ("latency_s", "latency_factor"))
        for amount, factor in pairs:
            if getattr(self, amount) is not None and getattr(self, factor) is not None:
                raise PydanticCustomError(
                    "set_twice",
                    "contradicts {factor}: give one of the two",
                    {"key": amount, "factor": factor},
                )
        if all(getattr(self, key) is None for pair in pairs for key in pair):
            names = ", ".join(key for pair in pairs for key in pair)
            raise PydanticCustomError("no_change", "must change something: {names}", {"names": names})
        return self

    def described(self) -> tuple[str, str]:
        """Return the link and its change in words."""
        changes = (
            ("bandwidth × {:g}", self.bandwidth_factor),
            ("bandwidth {:g} bytes/s", self.bandwidth_bytes_per_s),
            ("latency × {:g}", self.latency_factor),
            ("latency {:g} s", self.latency_s),
        )
        level = "" if self.level is None else f"{self.level} "
        described = ", ".join(form.format(amount) for form, amount in changes if amount is not None)
        return level + " – ".join(self.between), described


class PolicyEvent(TimetableEvent):
    """The transfer policy, or how the router decides, changes: values by key of the fleet file."""

    set: Annotated[Mapping[str, object], MinLen(1)]

    def described(self) -> tuple[str, str]:
        """Return the keys and their values, as a fleet file has them."""
        return ", ".join(self.set), ", ".join(map(_shown, self.set.values()))


class AddEvent(TimetableEvent):
    """Workers join that the fleet had not: ``replicas`` more of a ``group``, or new groups in the form of
    the fleet file.
    """

    group: Name | None = None
    replicas: Annotated[Whole, Interval(ge=1, le=REPLICAS_MAX)] | None = None
    workers: Annotated[tuple[WorkerGroup, ...], MaxLen(1024)] = ()

    @model_validator(mode="after")
    def _says_who(self) -> Self:
        if self.group is None and not self.workers:
            raise PydanticCustomError("nobody", "must have group, or workers")
        if self.group is not None and self.workers:
            key = {"key": "workers"}
            raise PydanticCustomError("set_twice", "contradicts group: give one of the two", key)
        if self.replicas is not None and self.group is None:
            key = {"key": "replicas"}
            raise PydanticCustomError("no_effect", "is of group: say it of each of workers", key)
        return self

    def described(self) -> tuple[str, str]:
        """Return the groups, and how many workers join, in words."""
        names = self.group or ", ".join(group.name for group in self.workers)
        n = sum(group.n_workers for group in self.workers) if self.group is None else self.replicas or 1
        return f"group {names}", "1 worker more" if n == 1 else f"{n} workers more"


LINK = "link"
"""The kind that may also happen while a fleet serves."""

KINDS: Mapping[str, type[TimetableEvent]] = MappingProxyType(
    {
        "die": DieEvent,
        "drain": DrainEvent,
        "join": JoinEvent,
        LINK: LinkEvent,
        "label": LabelEvent,
        "policy": PolicyEvent,
        "add": AddEvent,
    }
)
"""The classes of events, by the value of ``what``."""


def entry_of(event: TimetableEvent) -> TimetableEntry:
    """Return the event in words, for reports."""
    what = next(name for name, kind in KINDS.items() if type(event) is kind)
    return TimetableEntry(event.at_s, what, *event.described())


def read_timetable(path: FilePath, *, only: str | None = None) -> tuple[TimetableEvent, ...]:
    """Read the events of a YAML file, which are in the order of time. Raises ConfigError that names file,
    line and field of every mistake; with ``only``, an event of another kind is one.
    """
    document = read_document(path)
    problems = [
        Problem((key,), f"unknown key{did_you_mean(key, ['events'])}")
        for key in document.content
        if key != "events"
    ]
    entries = document.content.get("events")
    if not isinstance(entries, list):
        problems.append(Problem(("events",), "is required" if entries is None else "must be a list"))
        entries = []
    events: list[TimetableEvent] = []
    for number, entry in enumerate(entries):
        event, mistakes = _read(entry)
        at: Path = ("events", number)
        if event is not None and only is not None and not isinstance(event, KINDS[only]):
            mistakes = [Problem(("what",), f"must be {only}, not {entry['what']!r}: that is for a replay")]
        problems += [Problem((*at, *mistake.path), mistake.must) for mistake in mistakes]
        if event is None:
            continue
        if events and event.at_s < events[-1].at_s:
            must = f"must be ≥ {events[-1].at_s:g}, as events stand in the order of time, not {event.at_s:g}"
            problems.append(Problem((*at, "at_s"), must))
        events.append(event.standing(document, at))
    raise_problems(sorted(problems, key=lambda problem: document.line_of(problem.path)), document.place)
    return tuple(events)


def _read(entry: object) -> tuple[TimetableEvent | None, list[Problem]]:
    if not isinstance(entry, dict):
        return None, [Problem((), "must be a mapping of keys to values")]
    what = entry.get("what")
    kind = KINDS.get(what) if isinstance(what, str) else None
    if kind is None:
        listed = ", ".join(KINDS)
        if what is None:
            return None, [Problem(("what",), f"is required: {listed}")]
        return None, [
            Problem(("what",), f"must be one of {listed}, not {what!r}{did_you_mean(str(what), KINDS)}")
        ]
    try:
        return kind.model_validate({key: value for key, value in entry.items() if key != "what"}), []
    except ValidationError as error:
        return None, [problem_of(item, kind) for item in error.errors()]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
