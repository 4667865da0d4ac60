"""The result of a check: a problem with its remedy, or why it could not be made."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


class NotEnough(NamedTuple):
    """A check, or its part about a subject, with too little data for a verdict: more traffic will do."""

    subject: str
    why: str


class Compared(NamedTuple):
    """What a check compared, and how many, such as ``38 of 40 answers``. Each check has one."""

    what: str


Outcome = Problem | NotMade | NotEnough | Compared


class Check(NamedTuple):
    """A check: its name in reports, its statement on a fleet that passes, and its function."""

    name: str
    passes: str
    make: Callable[[Reading], Iterable[Outcome]]


class Finding(msgspec.Struct, frozen=True):
    """A problem, the name of the check that found it, and what that check compared."""

    check: str
    severity: Severity
    subject: str
    seen: str
    why: str
    remedy: str
    compared: str = ""


class Unmade(msgspec.Struct, frozen=True):
    """A check without a verdict, of which subject, and why: it could not be made, or had not enough data."""

    check: str
    subject: str
    why: str


class Passed(msgspec.Struct, frozen=True):
    """A check that found no problem, the statement that holds therefore, and what it compared."""

    check: str
    holds: str
    compared: str


class CacheShares(msgspec.Struct, frozen=True):
    """Prompt tokens of a model's answers: all, those that the router expected to be cached, and those that
    engines counted. The last two, and ``reported_prompt_tokens``, are of the ``reported_answers``, those
    whose engine says what it had; ``by_route`` has the numbers of these and of all answers of each route.
    ``engines_say`` is False if no engine says it.
    """

    model: str
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    engines_say: bool
    reported_prompt_tokens: int
    answers: int
    reported_answers: int
    by_route: Mapping[str, tuple[int, int]]

    @property
    def reported_by_route(self) -> str:
        """How many answers say it, by route, such as ``30 of 40 answers (chat 30 of 30, …)``."""
        routes = ", ".join(f"{route} {n:,} of {all_:,}" for route, (n, all_) in self.by_route.items())
        return f"{self.reported_answers:,} of {self.answers:,} answers" + (f" ({routes})" if routes else "")


class Report(msgspec.Struct, frozen=True):
    """All findings, the worst first; ``over_s`` is the period of the counts, None since the router began.
    ``format`` changes when a field gets another meaning.
    """

    url: str
    over_s: float | None
    findings: Sequence[Finding]
    passed: Sequence[Passed]
    not_made: Sequence[Unmade]
    not_enough: Sequence[Unmade]
    cache: Sequence[CacheShares]
    format: str = "kvrouter.doctor.v1"

    @property
    def has_problems(self) -> bool:
        """Whether anything is worse than a note."""
        return any(finding.severity is not Severity.NOTE for finding in self.findings)
