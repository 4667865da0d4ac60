"""What the subjects of KV events, loads and questions are called on NATS."""

from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.planes.names import subject_name


def events_subject(namespace: str, component: str, rank: WorkerRank) -> str:
    """Where a worker rank publishes its KV events."""
    return f"{_prefix(namespace)}.{subject_name(component)}.events.{rank.worker_id}.{rank.dp_rank}"


def loads_subject(namespace: str, component: str, rank: WorkerRank) -> str:
    """Where a worker rank publishes its load, whatever lane its events take on NATS."""
    return f"{_prefix(namespace)}.{subject_name(component)}.loads.{rank.worker_id}.{rank.dp_rank}"


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
