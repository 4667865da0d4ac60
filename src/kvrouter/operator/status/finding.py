"""Findings of conditions, their transition times, and the events of their changes."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from kvrouter.operator.api.status import Condition, ConditionStatus, DeploymentStatus

READY = "Ready"
AVAILABLE = "Available"
TOPOLOGY_RESOLVED = "TopologyResolved"
DOMAIN_BALANCED = "DomainBalanced"
UPGRADING = "Upgrading"
STALLED = "Stalled"
RECONCILING = "Reconciling"
NAMED_MAX = 5


class Finding(NamedTuple):
    """The result for a condition: its status, a stable word as reason, the state and remedy as message."""

    status: ConditionStatus
    reason: str
    message: str


def dated(
    kind: str, finding: Finding, previous: Iterable[Condition], *, generation: int, now: datetime
) -> Condition:
    """Return the condition of type ``kind``; its time is ``now`` only if its status has changed."""
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
    """Return the first names, and the number of further names."""
    found = sorted(names)
    more = len(found) - NAMED_MAX
    return ", ".join(found[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


RECORDED_FOR_EACH_MESSAGE = frozenset({"WriteRefused"})
"""Reasons with an event for every new message: another refusal is another mistake."""

NOTE_CHARS_MAX = 1024
"""The API server refuses a longer note."""


class EventType(StrEnum):
    """The types of Kubernetes events."""

    NORMAL = "Normal"
    WARNING = "Warning"


class ConditionEvent(NamedTuple):
    """An event about a condition, with the condition's reason."""

    type: EventType
    reason: str
    note: str


def events_of(previous: DeploymentStatus | None, current: DeploymentStatus) -> tuple[ConditionEvent, ...]:
    """Return an event for each condition of ``current`` with a new status or reason, and for each new
    refusal.

    Unknown conditions have no event; true ones have one only if they were not true before. A deployment that
    does not serve while its first pods start has no event; it gets one if it still does not when all are
    Ready.
    """
    before = {} if previous is None else {condition.type: condition for condition in previous.conditions}
    now = {condition.type: condition for condition in current.conditions}
    events = []
    for condition in current.conditions:
        was = before.get(condition.type)
        if condition.type in (STALLED, RECONCILING):
            if _is_new_stall(condition, was, now):
                note = condition.message[:NOTE_CHARS_MAX]
                events.append(ConditionEvent(EventType.WARNING, condition.reason, note))
            continue
        if was is not None and _is_known(was, condition) and not _is_settled_without(condition, before, now):
            continue
        if condition.status is ConditionStatus.UNKNOWN:
            continue
        holds = condition.status is ConditionStatus.TRUE
        if holds and (was is None or was.status is ConditionStatus.TRUE):
            continue
        if condition.type == AVAILABLE and not holds and _is_start(was, now):
            continue
        kind = EventType.NORMAL if holds or condition.reason == "Updating" else EventType.WARNING
        events.append(ConditionEvent(kind, condition.reason, condition.message[:NOTE_CHARS_MAX]))
    return tuple(events)


def _is_new_stall(condition: Condition, was: Condition | None, now: Mapping[str, Condition]) -> bool:
    """Whether it stalls for a new reason, which the event of Ready does not report too."""
    is_new = was is None or was.reason != condition.reason
    is_readys = READY in now and now[READY].reason == condition.reason
    return condition.type == STALLED and is_new and not is_readys


def _is_known(was: Condition, condition: Condition) -> bool:
    is_same = (was.status, was.reason) == (condition.status, condition.reason)
    return is_same and (condition.reason not in RECORDED_FOR_EACH_MESSAGE or was.message == condition.message)


def _is_start(was: Condition | None, now: Mapping[str, Condition]) -> bool:
    """Whether pods are not all Ready yet, and the deployment did not serve before."""
    return (was is None or was.status is not ConditionStatus.TRUE) and not _holds(now, READY)


def _is_settled_without(
    condition: Condition, before: Mapping[str, Condition], now: Mapping[str, Condition]
) -> bool:
    """Whether all pods became Ready, and the deployment still does not serve."""
    return condition.type == AVAILABLE and _holds(now, READY) and not _holds(before, READY)


def _holds(conditions: Mapping[str, Condition], kind: str) -> bool:
    return kind in conditions and conditions[kind].status is ConditionStatus.TRUE
