"""glibc's allocator: returns large blocks to the system. Other allocators do so by default."""

import ctypes
from functools import cache

MAPPED_BYTES = 1024 * 1024
"""Blocks of this size and more get a memory mapping each. By default, glibc raises the threshold to 32 MiB
once a block of that size was freed: a body that grows in the common heap is then copied when it can't grow in
place (at twice its length), and its memory is returned only when everything above it is free."""

_M_MMAP_THRESHOLD = -3  # malloc.h


def map_large_blocks() -> None:
    """Let blocks of :data:`MAPPED_BYTES` and more grow without a copy and return to the system when freed."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def trim() -> None:
    """Return freed memory to the system."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
