"""glibc's allocator: how what is large is given back to the system. Other allocators do so by themselves."""

import ctypes
from functools import cache

MAPPED_BYTES = 1024 * 1024
"""From this size on, memory is mapped on its own. Left alone, glibc raises the bound to 32 MiB once a block
of that size was freed: a body that grows in the common heap is copied when it can't grow in place (twice its
length is held), and its memory goes back only when all above it is free."""

_M_MMAP_THRESHOLD = -3  # malloc.h


def map_large_blocks() -> None:
    """Have blocks of :data:`MAPPED_BYTES` and more grow without a copy, and go back when they are freed."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def trim() -> None:
    """Give back to the system what was freed."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
