"""NATS subjects of KV events, loads and recovery."""

from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.transports.events.wire import VERSION
from kvrouter.transports.message_auth import MessageAuth
from kvrouter.transports.nats_client import subject_name


def message_auth_of(token: str, namespace: str) -> MessageAuth:
    """The seal of everything that the event plane says over NATS; each thing has a subject of its own."""
    return MessageAuth(token, f"events {VERSION} {subject_name(namespace)}")


def events_subject(namespace: str, component: str, rank: WorkerRank) -> str:
    """Where a worker rank publishes its KV events."""
    return f"{_prefix(namespace)}.{subject_name(component)}.events.{rank.worker_id}.{rank.dp_rank}"


def loads_subject(namespace: str, component: str, rank: WorkerRank) -> str:
    """Where a worker rank publishes its load, whatever transport its events take on NATS."""
    return f"{_prefix(namespace)}.{subject_name(component)}.loads.{rank.worker_id}.{rank.dp_rank}"


def is_said_by(subject: str, rank: WorkerRank) -> bool:
    """Whether events or loads on ``subject`` are those of ``rank``, of whatever component."""
    tokens = subject.split(".")
    return tokens[-2:] == [str(rank.worker_id), str(rank.dp_rank)]


def is_of_component(subject: str, component: str) -> bool:
    """Whether ``subject`` is one of events or loads of the component."""
    return subject.split(".")[-4] == subject_name(component)


def all_events(namespace: str) -> str:
    """The KV events of every worker of the namespace."""
    return f"{_prefix(namespace)}.*.events.*.*"


def all_loads(namespace: str) -> str:
    """The loads of every worker of the namespace."""
    return f"{_prefix(namespace)}.*.loads.*.*"


def recovery_subject(namespace: str, worker_id: WorkerId) -> str:
    """Where a worker answers for its past."""
    return f"{_prefix(namespace)}.recovery.{worker_id}"


def _prefix(namespace: str) -> str:
    return f"kvrouter.{subject_name(namespace)}"
