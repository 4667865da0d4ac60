"""The local indexer: what one rank holds, kept from its own events, for snapshots."""

from kvrouter.core.events import Held, KvEvent, Medium
from kvrouter.core.ids import DpRank, Slot
from kvrouter.index.native import BlockIndex

FIRST_RANK = DpRank(0)


class RankMirror:
    """What a router's index would have of the rank, in an index of the same kind: a rank of a million blocks
    is listed in a moment, so that its engine hardly waits when a router asks.

    Ranks of one process may share ``index``. A store whose parent the rank does not hold is left out, and
    routers count it as an orphan.
    """

    def __init__(self, index: BlockIndex | None = None, dp_rank: DpRank = FIRST_RANK) -> None:
        self._index = BlockIndex() if index is None else index
        self._slot = Slot(dp_rank)

    def apply(self, events: tuple[KvEvent, ...]) -> None:
        """Follow ``events``, in order. Raises ValueError when one of them is malformed."""
        self._index.apply(self._slot, events)

    def n_held(self) -> int:
        """How many blocks there are, over all media."""
        return sum(self._index.held(self._slot, medium) for medium in Medium)

    def held(self) -> tuple[Held, ...]:
        """All blocks, as a snapshot names them: a block that was stored ``n`` times is listed ``n`` times."""
        return tuple(self._index.dump(self._slot))
