"""Which memory moves to huge pages."""

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core import allocator

KIB, MIB = 1024, 1024 * 1024
PAGE = 2 * MIB


def mapping(begin: int, size_kib: int, rss_kib: int, *, rights: str = "rw-p", file: str = "") -> str:
    """A mapping as the kernel describes it, with some of its lines."""
    inode, device = (71, "fe:00") if file.startswith("/") else (0, "00:00")
    head = f"{begin:08x}-{begin + size_kib * KIB:08x} {rights} 00000000 {device} {inode}"
    return (
        f"{head:<72} {file}\nSize:           {size_kib} kB\nKernelPageSize:        4 kB\n"
        f"Rss:            {rss_kib} kB\nPss:            {rss_kib} kB\nVmFlags: rd wr mr mw me ac\n"
    )


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The huge pages that were asked for, of a system that uses them for a full mapping of 2 MiB at 2 MiB."""
    asked: list[int] = []

    def madvise(begin: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
        assert (length.value, advice) == (PAGE, 25)
        asked.append(begin.value or 0)
        return -1  # as before Linux 6.1

    monkeypatch.setattr(allocator, "_libc", lambda: SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(allocator, "HUGE_PAGES", tmp_path)
    monkeypatch.setattr(allocator, "MAPPINGS", tmp_path / "smaps")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{PAGE}\n")
    allocator.MAPPINGS.write_text(mapping(PAGE, 2048, 2048))
    return asked


def test_filled_anonymous_mappings_move_to_huge_pages(moved: list[int]) -> None:
    allocator.MAPPINGS.write_bytes(
        mapping(0x400000, 8192, 8192, rights="r-xp", file="/usr/bin/python3").encode()
        + mapping(0x1400000, 8192, 8192, file="/usr/lib/libd\xe4ta.so").encode("latin-1")
        + mapping(0x2500000, 6144, 5376, file="[heap]").encode()
        + mapping(0x7F0000000000, 8192, 7167).encode()
        + mapping(0x7F0010000000, 8192, 7168).encode()
        + mapping(0x7F0020000000, 8192, 8192, rights="---p").encode()
        + mapping(0x7F0030100000, 3072, 3072).encode()
        + mapping(0x7F0040100000, 2048, 2048).encode()
        + mapping(0x7FFF00000000, 8192, 8192, file="[stack]").encode()
    )
    allocator.use_huge_pages()
    assert moved == [
        *(0x2600000, 0x2800000),
        *(0x7F0010000000 + page * PAGE for page in range(4)),
        0x7F0030200000,
    ]


def test_at_most_256_mib_of_all_mappings_move(moved: list[int]) -> None:
    allocator.MAPPINGS.write_text(mapping(PAGE, 4096, 4096) + mapping(1024 * MIB, 1024 * KIB, 1024 * KIB))
    allocator.use_huge_pages()
    assert moved == [PAGE, 2 * PAGE, *(1024 * MIB + page * PAGE for page in range(126))]


@given(begin=st.integers(1, 4096), pages=st.integers(1, 4096), share=st.floats(0, 1))
def test_huge_pages_lie_within_mappings_that_are_seven_eighths_full(
    begin: int, pages: int, share: float
) -> None:
    """Of a mapping that begins at any page of 4 KiB and has any number of them."""
    size_kib, rss_kib = pages * 4, int(pages * share) * 4
    found = list(allocator.movable_pages(mapping(begin * 4 * KIB, size_kib, rss_kib).encode()))
    first, end = begin * 4 * KIB, (begin + pages) * 4 * KIB
    inside = [page for page in range(0, 64 * MIB, PAGE) if first <= page and page + PAGE <= end]
    assert found == (inside if rss_kib * 8 >= size_kib * 7 else [])


@pytest.mark.parametrize(
    ("file", "text"),
    [("enabled", "always madvise [never]\n"), ("hpage_pmd_size", f"{512 * MIB}\n")],
)
def test_nothing_moves_where_huge_pages_are_off_or_too_large(moved: list[int], file: str, text: str) -> None:
    (allocator.HUGE_PAGES / file).write_text(text)
    allocator.use_huge_pages()
    assert moved == []


@pytest.mark.parametrize("file", ["enabled", "hpage_pmd_size", "smaps"])
def test_nothing_moves_or_fails_where_the_systems_files_are_hidden(moved: list[int], file: str) -> None:
    hidden = allocator.HUGE_PAGES / file
    hidden.unlink()
    allocator.use_huge_pages()
    hidden.mkdir()
    allocator.use_huge_pages()
    assert moved == []


def test_a_filled_mapping_is_found_as_this_kernel_describes_it() -> None:
    """Between two without rights, so that the kernel joins it with no other."""
    region = mmap.mmap(-1, 12 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for end in (begin, begin + 10 * MIB):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(2 * MIB), 0) == 0
    filled = range(begin + 2 * MIB, begin + 10 * MIB)
    ctypes.memset(filled.start, 1, len(filled))
    pages = [
        page for page in allocator.movable_pages(Path("/proc/self/smaps").read_bytes()) if page in filled
    ]
    assert len(pages) in (3, 4)


def test_memory_is_as_before_once_it_moved() -> None:
    """Also where this machine's kernel refuses to move it."""
    block = bytearray(range(256)) * (16 * KIB)
    allocator.use_huge_pages()
    assert block == bytearray(range(256)) * (16 * KIB)
