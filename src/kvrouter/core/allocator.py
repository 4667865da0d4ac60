"""The process's memory: large blocks return to the system, and what is loaded moves to huge pages."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path

MAPPED_BYTES = 1024 * 1024
"""Blocks of this size and more get a memory mapping each. By default, glibc raises the threshold to 32 MiB
once a block of that size was freed: a body that grows in the common heap is then copied when it can't grow in
place (at twice its length), and its memory is returned only when everything above it is free."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
"""The system's settings of huge pages."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
MOVED_MAX = 128
"""At most this many huge pages are filled, 256 MiB: a frontend's heap is smaller, and no request reads all of
a larger one. It limits how long a move lasts, and how much memory it can add."""

MAPPINGS = Path("/proc/self/smaps")

_M_MMAP_THRESHOLD = -3  # malloc.h
_MADV_COLLAPSE = 25  # Linux 6.1, asm-generic/mman-common.h
_ANONYMOUS = re.compile(
    rb"^(?P<begin>\w+)-(?P<end>\w+) rw\S+ \S+ 00:00 0 +(?:\[heap\])?\n(?:\w+: .*\n)*?Rss: +(?P<rss>\d+) kB$",
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
    """Move the memory that is in use now to huge pages, at most :data:`MOVED_MAX`.

    A request touches some thousand places all over the heap, and a core that was idle finds them sooner in
    huge pages. Each moves in a call of its own: page faults, and the end of the process, wait for one only.
    Nothing moves where the setting is ``never``, a huge page has another size (512 MiB on some arm64), or a
    file of the system can't be read, nor before Linux 6.1.
    """
    with suppress(OSError):
        page_bytes = int((HUGE_PAGES / "hpage_pmd_size").read_text())
        if page_bytes == HUGE_PAGE_BYTES and "[never]" not in (HUGE_PAGES / "enabled").read_text():
            for address in islice(movable_pages(MAPPINGS.read_bytes()), MOVED_MAX):
                _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(page_bytes), _MADV_COLLAPSE)


def movable_pages(smaps: bytes) -> Iterator[int]:
    """Yield the addresses of huge pages within anonymous mappings of which 7/8 or more are in memory: in huge
    pages, a mapping's holes take memory too.
    """
    for found in _ANONYMOUS.finditer(smaps):
        begin, end = int(found["begin"], 16), int(found["end"], 16)
        if int(found["rss"]) * 1024 * 8 >= (end - begin) * 7:
            first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            yield from range(first, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
