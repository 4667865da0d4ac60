"""NATS subjects of KV events, loads and recovery."""

from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.transports.events.encoding import VERSION
from kvrouter.transports.message_auth import MessageAuth
from kvrouter.transports.nats_client import subject_name


def message_auth_of(token: str, namespace: str) -> MessageAuth:
    """Return the authentication of all messages of event transports over NATS."""
    return MessageAuth(token, f"events {VERSION} {subject_name(namespace)}")


def events_subject(namespace: str, component: str, rank: WorkerRank) -> str:
    """Return the subject of a worker rank's KV events."""
    return f"{_prefix(namespace)}.{subject_name(component)}.events.{rank.worker_id}.{rank.dp_rank}"


def loads_subject(namespace: str, component: str, rank: WorkerRank) -> str:
    """Return the subject of a worker rank's loads, whichever NATS transport its events take."""
    return f"{_prefix(namespace)}.{subject_name(component)}.loads.{rank.worker_id}.{rank.dp_rank}"


def is_from_rank(subject: str, rank: WorkerRank) -> bool:
    """Whether ``subject`` is one of ``rank``'s events or loads, in any component."""
    tokens = subject.split(".")
    return tokens[-2:] == [str(rank.worker_id), str(rank.dp_rank)]


def is_of_component(subject: str, component: str) -> bool:
    """Whether ``subject`` is one of the component's events or loads."""
    return subject.split(".")[-4] == subject_name(component)


def all_events(namespace: str) -> str:
    """Return the wildcard of the KV events of a namespace."""
    return f"{_prefix(namespace)}.*.events.*.*"


def all_loads(namespace: str) -> str:
    """Return the wildcard of the loads of a namespace."""
    return f"{_prefix(namespace)}.*.loads.*.*"


def recovery_subject(namespace: str, worker_id: WorkerId) -> str:
    """Return the subject of a worker's recovery."""
    return f"{_prefix(namespace)}.recovery.{worker_id}"


def _prefix(namespace: str) -> str:
    return f"kvrouter.{subject_name(namespace)}"
