"""What happens to a fleet during a replay: workers die, drain, come back, are added and get other labels;
links and policies change.
"""

from collections.abc import Mapping
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Annotated, NamedTuple, Self

from annotated_types import Interval, MaxLen, MinLen
from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvrouter.config.fleet import REPLICAS_MAX, DomainName, DomainValue, Name, WorkerGroup
from kvrouter.config.problems import (
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
from kvrouter.config.setting import Finite, FleetPart, NonNegative, Positive, Whole
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WORKER_IDS, WorkerId

BandwidthFactor = Annotated[Finite, Interval(ge=1e-6, le=1e6)]
LatencyFactor = Annotated[Finite, Interval(ge=0, le=1e6)]


class Standing(NamedTuple):
    """Where an event stands: at which path of which file; None where it was made in Python."""

    document: Document | None = None
    at: Path = ()

    def place(self, path: Path) -> str:
        """Return where one of its fields stands, as people look for it."""
        return dotted(path) if self.document is None else self.document.place((*self.at, *path))


class TimetableEvent(FleetPart):
    """Something that happens ``at_s`` seconds after the beginning."""

    at_s: Annotated[Finite, Interval(ge=0, le=1e9)]

    _standing: Standing = PrivateAttr(default=Standing())

    def standing(self, standing: Standing) -> Self:
        """Return it as an event of a file."""
        self._standing = standing
        return self

    def wrong(self, *problems: Problem) -> ConfigError:
        """Return the error for what cannot happen to a fleet: paths are those of its own fields."""
        return config_error(problems, self._standing.place)


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


class DieEvent(WorkersEvent):
    """They are gone at once, with their KV and their requests."""


class DrainEvent(WorkersEvent):
    """They get no new requests; those that they have go on, and their KV stays."""


class JoinEvent(WorkersEvent):
    """Those that died come back, with empty caches; those that drain get new requests again."""


class LabelEvent(WorkersEvent):
    """Their nodes' labels change: ``set`` has new values of levels, None takes one away."""

    set: Annotated[Mapping[DomainName, DomainValue | None], MinLen(1)]


class LinkEvent(TimetableEvent):
    """The link between two values of ``level`` changes, in both directions, also under what is on its way.

    Factors are of what the fleet file says. ``level`` may be left out: that of the transfer policy, else the
    broadest.
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


class PolicyEvent(TimetableEvent):
    """The transfer policy, or how the router decides, changes: values by key of the fleet file."""

    set: Annotated[Mapping[str, object], MinLen(1)]


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
"""What may happen, by the value of ``what``."""


def read_timetable(path: FilePath, *, only: str | None = None) -> tuple[TimetableEvent, ...]:
    """Read the events of a YAML file, which stand in the order of time. Raises ConfigError that names file,
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
        events.append(event.standing(Standing(document, at)))
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
