"""The local indexer: what one rank holds, kept from its own events, for snapshots."""

from collections import Counter

from kvrouter.core.columns import HASH_BYTES, HashColumn, pack_hashes, unpack_hashes
from kvrouter.core.events import Cleared, Held, KvEvent, Medium, Removed, Stored
from kvrouter.core.hashing import sequence_hashes


class _Blocks:
    """The blocks of one medium, by engine hash: the sequence hash of each, and how often it was stored."""

    __slots__ = ("sequences", "stores")

    def __init__(self) -> None:
        self.sequences: dict[int, int] = {}
        self.stores: Counter[int] = Counter()


class RankMirror:
    """Blocks by engine hash, counted per medium, with the sequence hash that each one chains to.

    A name that stood for other content stands for the new one alone, as in the routers' index. A store whose
    parent the rank does not hold has no sequence hash: it is left out, and routers count it as an orphan.
    """

    def __init__(self) -> None:
        self._media: dict[Medium, _Blocks] = {}

    def apply(self, events: tuple[KvEvent, ...]) -> None:
        """Follow ``events``, in order."""
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    self._media.clear()

    def held(self) -> tuple[Held, ...]:
        """All blocks, as a snapshot names them: a block that was stored ``n`` times is listed ``n`` times."""
        events = []
        for medium, blocks in self._media.items():
            names = tuple(blocks.stores.elements())
            if names:
                chained = pack_hashes(map(blocks.sequences.__getitem__, names))
                events.append(Held(pack_hashes(names), chained, medium))
        return tuple(events)

    def _store(self, event: Stored) -> None:
        chained = self._chain(event)
        if chained is None:
            return
        blocks = self._media.setdefault(event.medium, _Blocks())
        sequences, stores = blocks.sequences, blocks.stores
        for name, sequence in zip(unpack_hashes(event.engine_hashes), unpack_hashes(chained), strict=True):
            if sequences.get(name) == sequence:
                stores[name] += 1
            else:
                sequences[name] = sequence
                stores[name] = 1

    def _chain(self, event: Stored) -> HashColumn | None:
        """The sequence hashes of the stored blocks; None when the parent is not known."""
        if event.parent is None:
            return sequence_hashes(event.block_hashes)
        parent = self._sequence_of(event.parent, event.medium)
        if parent is None:
            return None
        # A sequence hash chains like a first block's own hash, so the parent's stands in for all before it.
        return sequence_hashes(pack_hashes([parent]) + event.block_hashes)[HASH_BYTES:]

    def _sequence_of(self, name: int, medium: Medium) -> int | None:
        """The sequence hash that the rank calls ``name``: in this medium, or in any other."""
        for each in (medium, *Medium):
            blocks = self._media.get(each)
            if blocks is not None and name in blocks.sequences:
                return blocks.sequences[name]
        return None

    def _remove(self, event: Removed) -> None:
        blocks = self._media.get(event.medium)
        if blocks is None:
            return
        for name in unpack_hashes(event.engine_hashes):
            stores = blocks.stores[name]
            if stores > 1:
                blocks.stores[name] = stores - 1
            elif stores:
                del blocks.stores[name], blocks.sequences[name]
