"""What happens to a fleet during a replay: workers die, and come back with empty caches."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.config.fleet import FleetFile
from kvrouter.config.fleet_workers import numbered_workers
from kvrouter.config.problems import read_document
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId


class Happening(StrEnum):
    """What becomes of the workers."""

    DIE = "die"
    """They are gone at once, with their KV and their requests."""
    JOIN = "join"
    """They come back, with empty caches."""


class TimetableEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At ``at_s`` seconds this happens to the workers of ``group`` that are in all of ``domains``; without
    either to all workers.
    """

    at_s: Annotated[float, Meta(ge=0, le=1e9)]
    what: Happening
    group: str | None = None
    domains: Mapping[str, str] = {}

    def workers(self, fleet: FleetFile) -> list[WorkerId]:
        """The workers that it is about."""
        return [
            worker_id
            for worker_id, group in numbered_workers(fleet)
            if self.group in (None, group.name)
            and all(group.domains.get(domain) == value for domain, value in self.domains.items())
        ]


class _Timetable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    events: list[TimetableEvent]


def read_timetable(path: Path) -> tuple[TimetableEvent, ...]:
    """Read the events of a YAML file, by time. Raises ConfigError that names the field."""
    try:
        timetable = msgspec.convert(read_document(path).content, _Timetable)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", param=str(path)) from error
    return tuple(sorted(timetable.events, key=lambda event: event.at_s))


def check_timetable(events: tuple[TimetableEvent, ...], fleet: FleetFile) -> None:
    """Raise ConfigError for an event that is about nobody."""
    for position, event in enumerate(events):
        if not event.workers(fleet):
            raise ConfigError(
                f"events[{position}]: no worker of the fleet is in this group and these domains",
                param="events",
            )
