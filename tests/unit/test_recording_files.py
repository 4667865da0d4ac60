"""The files of a recording: whole lines, one after another, and never more than they may hold."""

import gzip
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.recording.files import STORED_MAX_BYTES, RecordingFolder, recording_files, stored_member

Opened = Callable[..., RecordingFolder]


def opened(
    folder: Path, *, recording: str = "00000001", file_bytes: int = 1000, total_bytes: int = 10_000
) -> RecordingFolder:
    return RecordingFolder(
        folder, recording=recording, file_bytes=file_bytes, total_bytes=total_bytes, started_s=1.0
    )


def line(n_bytes: int = 400) -> bytes:
    """A line that packs to as many bytes as it has, or a few more."""
    return os.urandom(n_bytes).replace(b"\n", b"\r") + b"\n"


def test_a_file_is_whole_once_it_has_its_name_and_its_owners_alone(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a" / "b")
    assert not folder.is_open
    assert folder.begin() == 1
    folder.add(b"one\ntwo\n")
    (part,) = recording_files(tmp_path / "a" / "b")
    assert part.name == "recording-19700101T000001Z-00000001-000001.jsonl.gz.part"
    assert gzip.decompress(part.read_bytes()) == b"one\ntwo\n"
    folder.end()
    (whole,) = recording_files(tmp_path / "a" / "b")
    assert whole.name == part.name.removesuffix(".part")
    assert gzip.decompress(whole.read_bytes()) == b"one\ntwo\n"
    assert stat.S_IMODE(whole.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    folder.close()


def test_a_long_file_is_followed_by_the_next(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    numbers = []
    for _ in range(9):
        if not folder.is_open:
            numbers.append(folder.begin())
        folder.add(line())
    folder.end()
    assert numbers == [1, 2, 3]
    files = recording_files(tmp_path)
    assert [path.name.rpartition("-")[2] for path in files] == [f"{n:06d}.jsonl.gz" for n in (1, 2, 3)]
    assert all(1000 <= path.stat().st_size < 1600 for path in files)
    folder.close()


def test_the_oldest_files_go_before_all_of_them_hold_too_much(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl.gz"
    other.write_bytes(b"x" * 9000)
    killed = tmp_path / "recording-19600101T000000Z-0000000a-000001.jsonl.gz.part"
    killed.write_bytes(b"x" * 500)
    earlier = tmp_path / "recording-19600101T000000Z-0000000b-000001.jsonl.gz"
    earlier.write_bytes(b"x" * 500)
    folder = opened(tmp_path, total_bytes=5000)
    most = 0
    for _ in range(40):
        if not folder.is_open:
            folder.begin()
        folder.add(line())
        most = max(most, sum(path.stat().st_size for path in recording_files(tmp_path)))
    folder.end()
    assert 4000 < most <= 5000
    names = [path.name for path in recording_files(tmp_path)]
    assert not {killed.name, earlier.name} & set(names)
    assert names == sorted(names)
    assert "-000001." not in names[0]
    assert other.exists()
    folder.close()


def test_a_folder_is_one_process_s_alone_until_it_lets_go(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(ConfigError, match="another process records there") as caught:
        opened(tmp_path)
    assert caught.value.param == "folder"
    folder.close()
    opened(tmp_path).close()


def test_what_is_no_folder_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        opened(tmp_path / "file")
    assert caught.value.param == "folder"


def test_bytes_that_a_disk_takes_in_parts_are_all_written(tmp_path: Path) -> None:
    folder = RecordingFolder(
        tmp_path,
        recording="00000001",
        file_bytes=1000,
        total_bytes=10_000,
        started_s=1.0,
        write=lambda file, packed: os.write(file, packed[:7]),
    )
    folder.begin()
    lines = line() + line()
    folder.add(lines)
    folder.end()
    folder.close()
    (path,) = recording_files(tmp_path)
    assert gzip.decompress(path.read_bytes()) == lines


def test_files_of_several_frontends_come_in_the_order_of_their_starts(tmp_path: Path) -> None:
    for name in ("b", "a"):
        folder = opened(tmp_path / name, recording=f"0000000{name}")
        folder.begin()
        folder.end()
        folder.close()
    assert [path.parent.name for path in recording_files(tmp_path)] == ["a", "b"]


@given(
    st.binary(max_size=200),
    st.sampled_from(
        [0, 1, STORED_MAX_BYTES - 1, STORED_MAX_BYTES, STORED_MAX_BYTES + 1, 3 * STORED_MAX_BYTES]
    ),
)
def test_lines_that_are_stored_are_read_as_any_gzip_is(content: bytes, n_before: int) -> None:
    content = b"x" * n_before + content
    member = stored_member(bytearray(content))
    assert gzip.decompress(member) == content
    assert gzip.decompress(member + gzip.compress(b"more") + stored_member(b"last")) == content + b"morelast"
    assert len(member) <= len(content) + 5 * (len(content) // STORED_MAX_BYTES + 1) + 18
