"""Hash columns: many 64-bit hashes as one bytes object, so that no layer walks them as Python ints."""

import struct
from collections.abc import Iterable, Sequence

HashColumn = bytes
"""Unsigned 64-bit integers, little-endian, 8 bytes each, in block order."""

HASH_BYTES = 8


def pack_hashes(hashes: Sequence[int] | Iterable[int]) -> HashColumn:
    """Return the column of ``hashes``; each must fit in an unsigned 64-bit integer."""
    values = tuple(hashes)
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_hashes(column: HashColumn) -> tuple[int, ...]:
    """Return the hashes of ``column`` as Python ints."""
    return struct.unpack(f"<{len(column) // HASH_BYTES}Q", column)


def count_hashes(column: HashColumn) -> int:
    """Return how many hashes ``column`` holds."""
    return len(column) // HASH_BYTES
