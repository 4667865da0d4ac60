"""What placement reports as it happens: circuits that open, ranks and links that are slow."""

from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.kernel.fleet.circuit import Fault


class PlacementEvents:
    """Receives what happens to one model's workers and links, and does nothing with it. A placer is driven by
    requests, reports and time, and no caller of it could pass on what another one caused.
    """

    def failed(self, worker_id: WorkerId, fault: Fault) -> None:
        """A leg failed through the fault of a worker that is here."""

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A worker failed too often in a row."""

    def closed(self, worker_id: WorkerId) -> None:
        """A worker brought something again."""

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, *, for_s: float) -> None:
        """KV of a pair was lost, or lost again."""

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """KV of a pair arrived again."""

    def came(self, rank: WorkerRank, *, predicted_s: float, seen_s: float) -> None:
        """A first token came, after so long."""

    def turned(self, rank: WorkerRank, *, is_slow: bool, slowness: float) -> None:
        """A rank is slow from now on, or no longer: it takes ``slowness`` times as long as the others."""

    def link_turned(self, name: str, *, is_slow: bool, slowness: float) -> None:
        """A link, or a kind of link, is slow from now on, or no longer: it takes ``slowness`` times as long
        as it should.
        """

    def rank_gone(self, rank: WorkerRank) -> None:
        """A rank left of which first tokens came."""
