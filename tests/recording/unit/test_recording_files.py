"""The files of a recording: whole lines, one after another, and never more than they may hold."""

import gzip
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.recording.files import RecordingFolder, recording_files, searched_member

Opened = Callable[..., RecordingFolder]


def opened(
    folder: Path, *, recording: str = "00000001", file_bytes: int = 1000, total_bytes: int = 10_000
) -> RecordingFolder:
    return RecordingFolder(
        folder, recording=recording, file_bytes=file_bytes, total_bytes=total_bytes, started_s=1.0
    )


def head(part: int) -> bytes:
    return b"head %d\n" % part


def lines_of(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).split(b"\n")[:-1]


def line(n_bytes: int = 400) -> bytes:
    """A line that packs to as many bytes as it has, or a few more."""
    return os.urandom(n_bytes).replace(b"\n", b"\r") + b"\n"


def packed(n_bytes: int = 400) -> bytes:
    return searched_member(line(n_bytes))


def test_file_gets_its_final_name_when_whole_and_is_private(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a" / "b")
    assert recording_files(tmp_path / "a" / "b") == []
    assert folder.add(searched_member(b"one\ntwo\n"), head)
    (part,) = recording_files(tmp_path / "a" / "b")
    assert part.name == "recording-19700101T000001Z-00000001-000001.jsonl.gz.part"
    assert gzip.decompress(part.read_bytes()) == b"head 1\none\ntwo\n"
    folder.end()
    (whole,) = recording_files(tmp_path / "a" / "b")
    assert whole.name == part.name.removesuffix(".part")
    assert gzip.decompress(whole.read_bytes()) == b"head 1\none\ntwo\n"
    assert stat.S_IMODE(whole.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    folder.close()


def test_full_file_is_followed_by_a_file_with_its_own_head(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for _ in range(5):
        assert folder.add(packed(), head)
    folder.end()
    files = recording_files(tmp_path)
    assert [path.name.rpartition("-")[2] for path in files] == [f"{n:06d}.jsonl.gz" for n in (1, 2, 3)]
    assert [lines_of(path)[0] for path in files] == [b"head 1", b"head 2", b"head 3"]
    assert [len(lines_of(path)) for path in files] == [3, 3, 2]
    assert all(path.stat().st_size <= 1000 for path in files)
    folder.close()


def test_lines_longer_than_a_file_get_their_own_within_the_total_limit(
    tmp_path: Path,
) -> None:
    folder = opened(tmp_path, file_bytes=1000, total_bytes=2000)
    sizes = []
    for n_bytes in (400, 1700, 2100, 400, 1700):
        before = [path.read_bytes() for path in recording_files(tmp_path)]
        written = folder.add(packed(n_bytes), head)
        sizes.append((written, sum(path.stat().st_size for path in recording_files(tmp_path))))
        if not written:
            assert [path.read_bytes() for path in recording_files(tmp_path)] == before
    assert [written for written, _ in sizes] == [True, True, False, True, True]
    assert all(0 < size <= 2000 for _, size in sizes)
    folder.end()
    (path,) = recording_files(tmp_path)
    assert lines_of(path)[0] == b"head 4"
    folder.close()


def test_oldest_files_are_deleted_to_keep_the_total_limit(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl.gz"
    other.write_bytes(b"x" * 9000)
    killed = tmp_path / "recording-19600101T000000Z-0000000a-000001.jsonl.gz.part"
    killed.write_bytes(b"x" * 500)
    earlier = tmp_path / "recording-19600101T000000Z-0000000b-000001.jsonl.gz"
    earlier.write_bytes(b"x" * 500)
    folder = opened(tmp_path, total_bytes=5000)
    most = 0
    for _ in range(40):
        folder.add(packed(), head)
        most = max(most, sum(path.stat().st_size for path in recording_files(tmp_path)))
    folder.end()
    assert 4000 < most <= 5000
    names = [path.name for path in recording_files(tmp_path)]
    assert not {killed.name, earlier.name} & set(names)
    assert names == sorted(names)
    assert "-000001." not in names[0]
    assert other.exists()
    folder.close()


def test_folder_is_locked_until_its_recording_closes(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(ConfigError, match="another process records there") as caught:
        opened(tmp_path)
    assert caught.value.param == "folder"
    folder.close()
    opened(tmp_path).close()


def test_path_of_a_file_is_refused_as_folder_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        opened(tmp_path / "file")
    assert caught.value.param == "folder"


@pytest.fixture
def of_nobody() -> Iterator[Path]:
    """A folder of a user for whom its permissions hold, who this process is meanwhile."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        folder.chmod(0o700)
        os.seteuid(user)
        shutil.rmtree(folder)


@pytest.mark.parametrize(("mode", "why"), [(0o500, "cannot be written: Permission denied"),
                                            (0o300, "cannot be read: Permission denied")])  # fmt: skip
def test_unwritable_or_unreadable_folder_with_an_old_lock_is_refused(
    of_nobody: Path, mode: int, why: str
) -> None:
    opened(of_nobody).close()
    of_nobody.chmod(mode)
    with pytest.raises(ConfigError, match=why) as caught:
        opened(of_nobody)
    assert caught.value.param == "folder"
    of_nobody.chmod(0o700)
    opened(of_nobody).close()


@pytest.mark.parametrize("whole_folder", [True, False])
def test_lines_for_a_file_that_was_removed_are_refused(tmp_path: Path, *, whole_folder: bool) -> None:
    folder = opened(tmp_path / "a")
    folder.add(packed(), head)
    if whole_folder:
        shutil.rmtree(tmp_path / "a")
    else:
        recording_files(tmp_path / "a")[0].unlink()
    with pytest.raises(FileNotFoundError, match="was removed while it was written"):
        folder.add(packed(), head)
    folder.close()


def test_partial_writes_continue_until_all_bytes_are_written(tmp_path: Path) -> None:
    folder = RecordingFolder(
        tmp_path,
        recording="00000001",
        file_bytes=1000,
        total_bytes=10_000,
        started_s=1.0,
        write=lambda file, packed: os.write(file, packed[:7]),
    )
    lines = line() + line()
    folder.add(searched_member(lines), head)
    folder.end()
    folder.close()
    (path,) = recording_files(tmp_path)
    assert gzip.decompress(path.read_bytes()) == head(1) + lines


def test_files_of_several_frontends_are_listed_in_name_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        folder = opened(tmp_path / name, recording=f"0000000{name}")
        folder.add(packed(), head)
        folder.end()
        folder.close()
    assert [path.parent.name for path in recording_files(tmp_path)] == ["a", "b"]
