"""The process's memory: large blocks return to the system, and what is loaded moves to huge pages."""

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MAPPED_BYTES = 1024 * 1024
"""Blocks of this size and more get a memory mapping each. By default, glibc raises the threshold to 32 MiB
once a block of that size was freed: a body that grows in the common heap is then copied when it can't grow in
place (at twice its length), and its memory is returned only when everything above it is free."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""The system's setting of huge pages; absent where the kernel has none."""

MAPPINGS = Path("/proc/self/smaps")

_M_MMAP_THRESHOLD = -3  # malloc.h
_MADV_COLLAPSE = 25  # Linux 6.1, asm-generic/mman-common.h
_ANONYMOUS = re.compile(
    r"^(?P<begin>\w+)-(?P<end>\w+) rw\S+ \S+ 00:00 0 +(?:\[heap\])?\n(?:\w+: .*\n)*?Rss: +(?P<rss>\d+) kB$",
    re.MULTILINE,
)
"""A writable mapping of no file in ``smaps``, with the bytes of it that are in memory."""


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


def use_huge_pages() -> None:
    """Move the memory that is in use now to huge pages, unless the system's setting is ``never``.

    A request touches some thousand places all over the heap, and a core that was idle finds them sooner in
    huge pages. A kernel before Linux 6.1 refuses, and nothing changes.
    """
    if HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text():
        for begin, length in _filled_mappings(MAPPINGS.read_text()):
            _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_COLLAPSE)


def _filled_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield (address, length) of the anonymous mappings of which at least half is in memory: in huge pages,
    a mapping that is mostly unused would take memory for its holes.
    """
    for found in _ANONYMOUS.finditer(smaps):
        begin = int(found["begin"], 16)
        length = int(found["end"], 16) - begin
        if int(found["rss"]) * 1024 * 2 >= length:
            yield begin, length


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
