"""Stable 64-bit mixing: the same bits in every process, on every machine."""

from typing import Final

from kvrouter.core.ids import WorkerRank

_MASK64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mix64(bits: int) -> int:
    """Return splitmix64's output for ``bits``: each input bit changes each output bit half the time."""
    bits = (bits + _GOLDEN) & _MASK64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK64
    return bits ^ (bits >> 31)


def hash_rank(rank: WorkerRank) -> int:
    """Return 64 bits that depend on the worker rank alone."""
    return mix64(mix64(rank.worker_id) ^ rank.dp_rank)
