"""Doubles for placement without a service."""

from dataclasses import dataclass, field

from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.kernel.fleet.circuit import Fault
from kvrouter.kernel.placement.placement import Draw
from kvrouter.kernel.placement.placement_events import PlacementEvents

A_DRAW = Draw(seed=0, turn=0, room=0)


@dataclass(slots=True)
class RecordedPlacementEvents(PlacementEvents):
    """What placement told, in order."""

    heard: list[tuple[object, ...]] = field(default_factory=list)
    failures: list[tuple[WorkerId, Fault]] = field(default_factory=list)
    came_s: list[tuple[WorkerRank, float, float]] = field(default_factory=list)
    left: list[WorkerRank] = field(default_factory=list)
    turns: list[tuple[WorkerRank, bool, float]] = field(default_factory=list)
    links: list[tuple[str, bool, float]] = field(default_factory=list)

    def failed(self, worker_id: WorkerId, fault: Fault) -> None:
        """A leg failed through its worker's fault."""
        self.failures.append((worker_id, fault))

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A worker failed too often in a row."""
        self.heard.append(("opened", worker_id, fault, for_s))

    def closed(self, worker_id: WorkerId) -> None:
        """A worker brought something again."""
        self.heard.append(("closed", worker_id))

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, *, for_s: float) -> None:
        """KV of a pair was lost."""
        self.heard.append(("pair_opened", prefill, decode, for_s))

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """KV of a pair arrived again."""
        self.heard.append(("pair_closed", prefill, decode))

    def first_token_observed(self, rank: WorkerRank, *, predicted_s: float, seen_s: float) -> None:
        """A first token came."""
        self.came_s.append((rank, predicted_s, seen_s))

    def rank_speed_changed(self, rank: WorkerRank, *, is_slow: bool, slowness: float) -> None:
        """A rank is slow from now on, or no longer."""
        self.turns.append((rank, is_slow, slowness))

    def link_speed_changed(self, name: str, *, is_slow: bool, slowness: float) -> None:
        """A link is slow from now on, or no longer."""
        self.links.append((name, is_slow, slowness))

    def rank_gone(self, rank: WorkerRank) -> None:
        """A rank left of which first tokens came."""
        self.left.append(rank)
