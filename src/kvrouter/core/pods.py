"""A pod that holds an engine, as far as that matters to whoever serves it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class PodPort(NamedTuple):
    """A TCP port that a container says it listens on; ``name`` may be empty."""

    name: str
    number: int
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """One pod as its namespace shows it now.

    ``starts`` tells, by the container, one start of it from the next. A pod that ``is_leaving`` was deleted
    and has not ended yet; one that ``is_over`` has ended for good.
    """

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ip: str = ""
    ports: tuple[PodPort, ...] = ()
    starts: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = False
    is_leaving: bool = False
    is_over: bool = False
