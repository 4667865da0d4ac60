"""Files are written as a whole; what is no file stays what it is."""

import os
import stat
import threading
from pathlib import Path

import pytest

from kvrouter.app.atomic_file import check_folder, write_atomic
from kvrouter.core.errors import ConfigError


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for content in (b"first", b"second"):
        check_folder(path)
        write_atomic(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path("folder") / "target")
    for content in (b"first", b"second"):
        check_folder(link)
        write_atomic(link, content)
        assert link.is_symlink()
        assert (tmp_path / "folder" / "target").read_bytes() == content


def test_a_pipe_stays_and_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    check_folder(path)
    write_atomic(path, b"content")
    reader.join(30)
    assert read == [b"content"]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_an_open_file_keeps_what_it_has(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        path = Path(f"/dev/fd/{log.fileno()}")
        check_folder(path)
        write_atomic(path, b"content\n")
    assert (tmp_path / "log").read_text() == "before\ncontent\n"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path in (tmp_path, tmp_path / "absent" / "file", circle / "file"):
        with pytest.raises(ConfigError, match=str(path)):
            check_folder(path)
        with pytest.raises(ConfigError, match=str(path)):
            write_atomic(path, b"content")
