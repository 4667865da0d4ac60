"""The local indexer: what one rank holds, kept from its own events, for snapshots."""

from collections import Counter

from kvrouter.core.columns import HASH_BYTES, HashColumn, pack_hashes, unpack_hashes
from kvrouter.core.events import Cleared, Held, KvEvent, Medium, Removed, Stored
from kvrouter.core.hashing import sequence_hashes


class RankMirror:
    """Blocks by engine hash, counted per medium, with the sequence hash that each one chains to.

    ``orphans`` counts the stores whose parent the rank does not hold: no sequence hash, so they are left out.
    """

    def __init__(self) -> None:
        self.orphans = 0
        self._sequences: dict[int, int] = {}
        self._stores: dict[Medium, Counter[int]] = {}

    def apply(self, events: tuple[KvEvent, ...]) -> None:
        """Follow ``events``, in order."""
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    self._sequences.clear()
                    self._stores.clear()

    def held(self) -> tuple[Held, ...]:
        """All blocks, as a snapshot names them: a block that was stored ``n`` times is listed ``n`` times."""
        events = []
        for medium, stores in self._stores.items():
            blocks = tuple(stores.elements())
            if blocks:
                chained = pack_hashes(self._sequences[block] for block in blocks)
                events.append(Held(pack_hashes(blocks), chained, medium))
        return tuple(events)

    def _store(self, event: Stored) -> None:
        chained = self._chain(event)
        if chained is None:
            self.orphans += 1
            return
        blocks = unpack_hashes(event.engine_hashes)
        self._sequences.update(zip(blocks, unpack_hashes(chained), strict=True))
        self._stores.setdefault(event.medium, Counter()).update(blocks)

    def _chain(self, event: Stored) -> HashColumn | None:
        """The sequence hashes of the stored blocks; None when the parent is not known."""
        if event.parent is None:
            return sequence_hashes(event.block_hashes)
        parent = self._sequences.get(event.parent)
        if parent is None:
            return None
        # A sequence hash chains like a first block's own hash, so the parent's stands in for all before it.
        return sequence_hashes(pack_hashes([parent]) + event.block_hashes)[HASH_BYTES:]

    def _remove(self, event: Removed) -> None:
        stores = self._stores.get(event.medium)
        for block in unpack_hashes(event.engine_hashes) if stores else ():
            if stores is None or not stores[block]:
                continue
            stores[block] -= 1
            if not stores[block]:
                del stores[block]
                if not any(block in others for others in self._stores.values()):
                    del self._sequences[block]
