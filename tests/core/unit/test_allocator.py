"""Which memory moves to huge pages."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrouter.core import allocator

KIB, MIB = 1024, 1024 * 1024


def mapping(begin: int, size_kib: int, rss_kib: int, *, rights: str = "rw-p", file: str = "") -> str:
    """A mapping as the kernel describes it, with some of its lines."""
    inode, device = (71, "fe:00") if file.startswith("/") else (0, "00:00")
    head = f"{begin:08x}-{begin + size_kib * KIB:08x} {rights} 00000000 {device} {inode}"
    return (
        f"{head:<72} {file}\nSize:           {size_kib} kB\nKernelPageSize:        4 kB\n"
        f"Rss:            {rss_kib} kB\nPss:            {rss_kib} kB\nVmFlags: rd wr mr mw me ac\n"
    )


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """The (address, length) that were asked to move, of a system that uses huge pages where they are asked
    for.
    """
    asked: list[tuple[int, int]] = []

    def madvise(begin: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
        assert advice == 25
        asked.append((begin.value or 0, length.value))
        return -1  # as before Linux 6.1

    monkeypatch.setattr(allocator, "_libc", lambda: SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(allocator, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(allocator, "MAPPINGS", tmp_path / "smaps")
    allocator.HUGE_PAGES.write_text("always [madvise] never\n")
    return asked


def test_filled_anonymous_mappings_move_to_huge_pages(moved: list[tuple[int, int]]) -> None:
    allocator.MAPPINGS.write_text(
        mapping(0x400000, 8192, 8192, rights="r-xp", file="/usr/bin/python3")
        + mapping(0x1400000, 8192, 8192, file="/usr/lib/libdata.so")
        + mapping(0x2400000, 4096, 4000, file="[heap]")
        + mapping(0x7F0000000000, 65536, 32767)
        + mapping(0x7F0010000000, 65536, 32768)
        + mapping(0x7F0020000000, 8192, 8192, rights="---p")
        + mapping(0x7FFF00000000, 8192, 8192, file="[stack]")
    )
    allocator.use_huge_pages()
    assert moved == [(0x2400000, 4 * MIB), (0x7F0010000000, 64 * MIB)]


def test_nothing_moves_where_the_system_has_no_huge_pages(moved: list[tuple[int, int]]) -> None:
    allocator.MAPPINGS.write_text(mapping(0x7F0000000000, 8192, 8192))
    allocator.HUGE_PAGES.write_text("always madvise [never]\n")
    allocator.use_huge_pages()
    allocator.HUGE_PAGES.unlink()
    allocator.use_huge_pages()
    assert moved == []


def test_memory_is_as_before_once_it_moved() -> None:
    """Also where this machine's kernel refuses to move it."""
    block = bytearray(range(256)) * (16 * KIB)
    allocator.use_huge_pages()
    assert block == bytearray(range(256)) * (16 * KIB)
