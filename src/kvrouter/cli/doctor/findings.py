"""The result of a check: a problem with its remedy, or why it could not be made."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvrouter.cli.doctor.reading import Reading


class Severity(StrEnum):
    """How bad a problem is, the worst first.

    ``CRITICAL``: requests fail, or will after one more failure. ``WARNING``: the fleet is slower or less safe
    than it should be. ``NOTE``: no problem now, but it explains an observation.
    """

    CRITICAL = "critical"
    WARNING = "warning"
    NOTE = "note"


STRANGERS = 10
"""So many refused peers or messages since the router began are more than a port scan or a late start."""


def severity_of_strangers(n: float) -> Severity:
    """Return the severity of ``n`` refused peers, or messages of theirs."""
    return Severity.WARNING if n >= STRANGERS else Severity.NOTE


class Problem(NamedTuple):
    """One problem: its subject, the observation, why it matters, and its remedy."""

    severity: Severity
    subject: str
    seen: str
    why: str
    remedy: str


class NotMade(NamedTuple):
    """A check, or its part about a subject, that could not be made: the result is unknown."""

    subject: str
    why: str


Outcome = Problem | NotMade


class Check(NamedTuple):
    """A check: its name in reports, its statement on a fleet that passes, and its function."""

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
    """A check that found no problem, and the statement that holds therefore."""

    check: str
    holds: str


class CacheShares(msgspec.Struct, frozen=True):
    """Prompt tokens of a model's requests: all, those that the router expected to be cached, and those that
    engines counted. ``engines_say`` is False if they do not count them.
    """

    model: str
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    engines_say: bool


class Report(msgspec.Struct, frozen=True):
    """All findings, the worst first; ``over_s`` is the period of the counts, None since the router began.
    ``format`` changes when a field gets another meaning.
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
