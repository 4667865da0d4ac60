"""The events that placement reports: opened circuits, slow ranks and slow links."""

from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.kernel.fleet.circuit import Fault


class PlacementEvents:
    """Receives the events of one model's workers and links; the base class ignores them. It is passed to the
    placer because an event may occur in a call that another request caused.
    """

    def failed(self, worker_id: WorkerId, fault: Fault) -> None:
        """Called when a leg failed through the fault of a worker in the fleet."""

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """Called when a worker's circuit opens for ``for_s``."""

    def closed(self, worker_id: WorkerId) -> None:
        """Called when a worker's circuit closes."""

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, fault: Fault, *, for_s: float) -> None:
        """Called when a pair gets no requests for now, because of ``fault``."""

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """Called when KV of a broken pair arrived again."""

    def first_token_observed(self, rank: WorkerRank, *, predicted_s: float, seen_s: float) -> None:
        """Called with the predicted and the measured time of a first token."""

    def rank_speed_changed(self, rank: WorkerRank, *, is_slow: bool, slowness: float) -> None:
        """Called when a rank becomes slow or recovers; ``slowness`` is relative to the other ranks."""

    def link_speed_changed(self, name: str, *, is_slow: bool, slowness: float) -> None:
        """Called when a link, or a kind of link, becomes slow or recovers, relative to its expected speed."""

    def rank_gone(self, rank: WorkerRank) -> None:
        """Called when a rank with measured first tokens left."""
