"""What a check of a fleet says: a problem with its remedy, or why it could not be made."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvrouter.cli.doctor.reading import Reading


class Severity(StrEnum):
    """How bad a problem is, the worst first.

    ``CRITICAL``: requests fail, or will as soon as one more thing does. ``WARNING``: the fleet is slower or
    less safe than it should be. ``NOTE``: nothing is wrong now, and it explains what was seen.
    """

    CRITICAL = "critical"
    WARNING = "warning"
    NOTE = "note"


STRANGERS = 10
"""So many refused peers or messages since the router began are more than a port scan or a late start."""


def severity_of_strangers(n: float) -> Severity:
    """Return how bad it is that so many peers, or messages of theirs, were refused."""
    return Severity.WARNING if n >= STRANGERS else Severity.NOTE


class Problem(NamedTuple):
    """One thing that is wrong: with what, what was seen of it, why it matters, and what ends it."""

    severity: Severity
    subject: str
    seen: str
    why: str
    remedy: str


class NotMade(NamedTuple):
    """A check, or its part about a subject, that could not be made: nothing is known, good or bad."""

    subject: str
    why: str


Outcome = Problem | NotMade


class Check(NamedTuple):
    """A check: its name in reports, what it says of a fleet that passes, and the function that makes it."""

    name: str
    passes: str
    make: Callable[[Reading], Iterable[Outcome]]


class Finding(msgspec.Struct, frozen=True):
    """A problem, and the name of the check that found it."""

    check: str
    severity: Severity
    subject: str
    seen: str
    why: str
    remedy: str


class Unmade(msgspec.Struct, frozen=True):
    """A check that could not be made, of which subject, and why."""

    check: str
    subject: str
    why: str


class Passed(msgspec.Struct, frozen=True):
    """A check that found nothing, and what holds therefore."""

    check: str
    holds: str


class CacheShares(msgspec.Struct, frozen=True):
    """Prompt tokens of a model's requests: all, those that the router expected to be cached, and those that
    engines say were. ``engines_say`` False: they do not count them.
    """

    model: str
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    engines_say: bool


class Report(msgspec.Struct, frozen=True):
    """All that was found, the worst first; ``over_s`` is how long counts were taken over, None since the
    router began. ``format`` changes when a field gets another meaning.
    """

    url: str
    over_s: float | None
    findings: Sequence[Finding]
    passed: Sequence[Passed]
    not_made: Sequence[Unmade]
    cache: Sequence[CacheShares]
    format: str = "kvrouter.doctor.v1"

    @property
    def has_problems(self) -> bool:
        """Whether anything is worse than a note."""
        return any(finding.severity is not Severity.NOTE for finding in self.findings)
