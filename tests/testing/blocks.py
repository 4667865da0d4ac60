"""Blocks as an index holds them and as an engine holds them, to be compared: names, and how often stored."""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrouter.core.events import Held, KvEvent, unpack_hashes
from kvrouter.core.ids import DpRank, Slot
from kvrouter.engines.port import SnapshotEngine
from kvrouter.worker import Worker
from tests.oracles.index import NaiveBlockIndex

Blocks = Counter[tuple[int, int]]
"""(engine hash, sequence hash) of each block → how often it was stored."""


def blocks(held: Iterable[Held]) -> Blocks:
    """The blocks of a dump, or of a snapshot."""
    counted: Blocks = Counter()
    for event in held:
        pairs = zip(unpack_hashes(event.engine_hashes), unpack_hashes(event.sequence_hashes), strict=True)
        counted.update(pairs)
    return counted


def reported_by(worker: Worker, dp_rank: DpRank) -> tuple[KvEvent, ...]:
    """What a worker's engine says that a rank's cache holds."""
    assert isinstance(worker.engine, SnapshotEngine)
    return worker.engine.snapshot(dp_rank)


def blocks_of_cache(snapshot: Sequence[KvEvent]) -> Blocks:
    """The blocks of an engine's own account of its cache, which lists each once and every parent first."""
    index = NaiveBlockIndex()
    applied = index.apply(Slot(0), snapshot)
    assert (applied.orphaned, applied.repeated) == (0, 0)
    return blocks(index.dump(Slot(0)))
