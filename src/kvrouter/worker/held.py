"""A snapshot's form: blocks by sequence hash, from an engine's stores."""

from collections.abc import Iterable

from kvrouter.core.columns import HASH_BYTES, HashColumn, unpack_hashes
from kvrouter.core.events import Held, KvEvent, Stored
from kvrouter.core.hashing import sequence_hashes
from kvrouter.core.ids import EngineHash


def held_of(stores: Iterable[KvEvent]) -> tuple[Held, ...]:
    """Return what ``stores`` hold; parents come before their children.

    Raises ValueError for a store whose parent did not come before it, and for anything that is no store.
    """
    sequence_of: dict[int, bytes] = {}
    held: list[Held] = []
    for event in stores:
        if not isinstance(event, Stored):
            raise ValueError(f"a snapshot is made of stores, not of {type(event).__name__}")
        column = _sequences(event, sequence_of)
        for index, engine_hash in enumerate(unpack_hashes(event.engine_hashes)):
            sequence_of[engine_hash] = column[HASH_BYTES * index : HASH_BYTES * (index + 1)]
        held.append(Held(event.engine_hashes, column, event.medium))
    return tuple(held)


def _sequences(event: Stored, sequence_of: dict[int, bytes]) -> HashColumn:
    """Chain the blocks of one store to their parent: the chain goes on from any of its own hashes."""
    if event.parent is None:
        return sequence_hashes(event.block_hashes)
    parent = sequence_of.get(EngineHash(event.parent))
    if parent is None:
        raise ValueError(f"the parent {event.parent} of a store is not in the snapshot")
    return sequence_hashes(parent + event.block_hashes)[HASH_BYTES:]
