"""What a listener passes on of an engine's events."""

from kvrouter.core.events import Cleared, KvEvent, Stored, unpack_hashes
from kvrouter.core.ids import DpRank


class EventRecorder:
    """``stored`` are the names of all blocks in order, ``held`` those since the last clear."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.held: list[int] = []
        self.ranks: set[DpRank] = set()
        self.n_cleared = 0
        self.said: list[str] = []

    def on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        self.ranks.add(dp_rank)
        for event in events:
            if isinstance(event, Stored):
                names = list(unpack_hashes(event.engine_hashes))
                self.stored += names
                self.held += names
            elif isinstance(event, Cleared):
                self.n_cleared += 1
                self.held.clear()

    def on_change(self, why: str) -> None:
        self.said.append(why)
