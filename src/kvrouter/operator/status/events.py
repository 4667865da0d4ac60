"""Events: one for each condition that became another."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from kvrouter.operator.api import Condition, ConditionStatus, DeploymentStatus
from kvrouter.operator.status.finding import AVAILABLE, READY

RECORDED_FOR_EACH_MESSAGE = frozenset({"WriteRefused"})
"""Reasons whose every new message is an event: another refusal is another mistake."""

NOTE_CHARS_MAX = 1024
"""The API server refuses a longer one."""


class EventType(StrEnum):
    """How Kubernetes tells good from bad."""

    NORMAL = "Normal"
    WARNING = "Warning"


class Event(NamedTuple):
    """What is told once; its reason is the condition's."""

    type: EventType
    reason: str
    note: str


def events_of(previous: DeploymentStatus | None, current: DeploymentStatus) -> tuple[Event, ...]:
    """Return an event for each condition of ``current`` whose status or reason was another, and for each
    refusal in other words.

    What is not known yet is no event; that something holds is one only where it did not. That nobody serves
    while the first pods start is none either: it is one when all of them are Ready, and still nobody does.
    """
    before = {} if previous is None else {condition.type: condition for condition in previous.conditions}
    now = {condition.type: condition for condition in current.conditions}
    events = []
    for condition in current.conditions:
        was = before.get(condition.type)
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
        events.append(Event(kind, condition.reason, condition.message[:NOTE_CHARS_MAX]))
    return tuple(events)


def _is_known(was: Condition, condition: Condition) -> bool:
    is_same = (was.status, was.reason) == (condition.status, condition.reason)
    return is_same and (condition.reason not in RECORDED_FOR_EACH_MESSAGE or was.message == condition.message)


def _is_start(was: Condition | None, now: Mapping[str, Condition]) -> bool:
    """Whether pods are not all Ready yet, and nobody served before."""
    return (was is None or was.status is not ConditionStatus.TRUE) and not _holds(now, READY)


def _is_settled_without(
    condition: Condition, before: Mapping[str, Condition], now: Mapping[str, Condition]
) -> bool:
    """Whether all pods became Ready, and still nobody serves."""
    return condition.type == AVAILABLE and _holds(now, READY) and not _holds(before, READY)


def _holds(conditions: Mapping[str, Condition], kind: str) -> bool:
    return kind in conditions and conditions[kind].status is ConditionStatus.TRUE
