"""A condition before it is dated, and its date: that of its last change."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from kvrouter.operator.api import Condition, ConditionStatus

READY = "Ready"
AVAILABLE = "Available"
TOPOLOGY_RESOLVED = "TopologyResolved"
DOMAIN_BALANCED = "DomainBalanced"
NAMED_MAX = 5


class Finding(NamedTuple):
    """Whether a condition holds, why in one stable word, and what is so and how to mend it."""

    status: ConditionStatus
    reason: str
    message: str


def dated(
    kind: str, finding: Finding, previous: Iterable[Condition], *, generation: int, now: datetime
) -> Condition:
    """Return the condition of type ``kind``; its time is ``now`` only when its status has changed."""
    times = [
        condition.last_transition_time
        for condition in previous
        if condition.type == kind and condition.status is finding.status
    ]
    return Condition(
        type=kind,
        status=finding.status,
        reason=finding.reason,
        message=finding.message,
        last_transition_time=times[0] if times else now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        observed_generation=generation,
    )


def named(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    found = sorted(names)
    more = len(found) - NAMED_MAX
    return ", ".join(found[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
