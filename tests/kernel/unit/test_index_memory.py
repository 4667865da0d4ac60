"""The native index gives back what it took, and takes little."""

import threading

import numpy as np
import pytest

from kvrouter.core.events import Cleared, Removed, Stored, pack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.kernel.index import NativeBlockIndex

N_RANKS = 8
BLOCKS_A_RANK = 65_536


def store(of_rank: int, *, blocks_of: int) -> Stored:
    """As many blocks as a rank has, with names and content drawn by two numbers."""
    names = np.random.default_rng(of_rank).integers(0, 2**64, BLOCKS_A_RANK, dtype=np.uint64)
    blocks = np.random.default_rng(1000 + blocks_of).integers(0, 2**64, BLOCKS_A_RANK, dtype=np.uint64)
    return Stored(None, names.tobytes(), blocks.tobytes())


@pytest.mark.parametrize(("shared", "bytes_max"), [(False, 34.0), (True, 19.0)])
def test_index_memory_per_block_is_bounded_and_freed_by_clears(shared: bool, bytes_max: float) -> None:
    index = NativeBlockIndex()
    for rank in range(N_RANKS):
        index.apply(Slot(rank), [store(rank, blocks_of=0 if shared else rank)])
    assert index.stats().blocks[0] == N_RANKS * BLOCKS_A_RANK
    assert index.stats().bytes / (N_RANKS * BLOCKS_A_RANK) < bytes_max
    for rank in range(N_RANKS):
        assert index.apply(Slot(rank), [Cleared()]).cleared == BLOCKS_A_RANK
    assert index.stats().bytes == 0


def test_index_memory_shrinks_as_blocks_are_removed() -> None:
    index = NativeBlockIndex()
    events = {rank: store(rank, blocks_of=rank) for rank in range(2)}
    for rank, event in events.items():
        index.apply(Slot(rank), [event])
    full = index.stats().bytes
    for rank, event in events.items():
        index.apply(Slot(rank), [Removed(event.engine_hashes[: 7 * len(event.engine_hashes) // 8])])
    assert index.stats().bytes < full / 5
    for rank, event in events.items():
        index.apply(Slot(rank), [Removed(event.engine_hashes[7 * len(event.engine_hashes) // 8 :])])
    assert index.stats().bytes == 0


def test_index_memory_is_bounded_for_counting_engine_hashes() -> None:
    index = NativeBlockIndex()
    blocks = store(0, blocks_of=0).block_hashes
    for rank, step in enumerate([1, 2, 4096, 1 << 32, 1 << 48]):
        names = np.arange(BLOCKS_A_RANK, dtype=np.uint64) * np.uint64(step)
        index.apply(Slot(rank), [Stored(None, names.tobytes(), blocks)])
        assert index.held(Slot(rank)) == BLOCKS_A_RANK
    assert index.stats().bytes / (5 * BLOCKS_A_RANK) < 24.0


def test_overlap_can_be_read_while_a_large_batch_is_applied() -> None:
    index = NativeBlockIndex()
    prompt = Prompt(range(512), block_size=1)
    index.apply(Slot(0), [Stored(None, pack_hashes(range(512)), prompt.block_hashes)])
    big = store(1, blocks_of=1)
    pieces = [
        Stored(None, big.engine_hashes[at : at + 4096], big.block_hashes[at : at + 4096])
        for at in range(0, len(big.engine_hashes), 4096)
    ]
    writer = threading.Thread(target=lambda: [index.apply(Slot(1), pieces) for _ in range(4)])
    writer.start()
    out = np.zeros(2, np.uint32)
    while writer.is_alive():
        index.overlap(prompt, out)
        assert out[0] == 512
    writer.join()
    assert index.held(Slot(1)) == BLOCKS_A_RANK
