"""What the lane's parts share: names, limits, who is told, and the errors of the client."""

from dataclasses import dataclass
from typing import Protocol

import nats.errors

from kvrouter.core.ids import WorkerRank
from kvrouter.planes.events.port import ForeignRank
from kvrouter.planes.names import subject_name

CLIENT_ERRORS = (nats.errors.Error, OSError)
"""What a call to NATS may end with: its own errors, and those of the socket; a timeout is among both."""

STREAM_MAX_BYTES = 1 << 30
"""How much one component's stream keeps; beyond it the oldest messages go, and routers ask workers."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one component's stream keeps; the oldest messages go first.

    ``max_age_s`` None: as long as there is room. ``replicas``: copies in a NATS cluster. The limits are those
    of the process that makes the stream; later ones leave it as it is.
    """

    max_bytes: int = STREAM_MAX_BYTES
    max_age_s: float | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class LaneNames:
    """What one component's stream, subjects and snapshots are called on NATS."""

    namespace: str
    component: str

    @property
    def stream(self) -> str:
        """The persistent stream."""
        return f"kvrouter-{subject_name(self.namespace)}-{subject_name(self.component)}-kv-events"

    @property
    def bucket(self) -> str:
        """The key-value bucket and the object store of the snapshots."""
        return f"kvrouter-{subject_name(self.namespace)}-{subject_name(self.component)}-index"

    @property
    def all_events(self) -> str:
        """The subjects of the stream."""
        return f"{self._prefix}.kv.*.*"

    @property
    def all_loads(self) -> str:
        """The loads of the component's workers."""
        return f"{self._prefix}.loads.*.*"

    def events(self, rank: WorkerRank) -> str:
        """Where one worker rank publishes its KV events."""
        return f"{self._prefix}.kv.{rank.worker_id}.{rank.dp_rank}"

    @property
    def _prefix(self) -> str:
        return f"kvrouter.{subject_name(self.namespace)}.{subject_name(self.component)}"


class LaneObserver(Protocol):
    """Who is told what happens on the lane. Called on the event loop; must not block or raise."""

    def dropped(self, n_batches: int, why: str) -> None:
        """A worker's batches were not published; routers will see the gap and ask."""

    def refused(self, why: str) -> None:
        """A message that is no batch or load was let go."""

    def spoke_for_another(self, error: ForeignRank) -> None:
        """A message that names a rank of another worker than its subject was let go."""

    def disturbed(self, component: str, why: str) -> None:
        """The lane could not do what it wanted, and tries again."""

    def was_reset(self, component: str) -> None:
        """The stream and the snapshots of the component were cleared, as asked."""


class Unobserved:
    """Nobody is told."""

    def dropped(self, n_batches: int, why: str) -> None:
        """Nobody counts."""

    def refused(self, why: str) -> None:
        """Nobody counts."""

    def spoke_for_another(self, error: ForeignRank) -> None:
        """Nobody counts."""

    def disturbed(self, component: str, why: str) -> None:
        """Nobody reads."""

    def was_reset(self, component: str) -> None:
        """Nobody reads."""
