"""Only regular files are read: what may never begin, or never end, is refused at once."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.files import open_regular, read_regular
from kvrouter.settings.problems import read_document
from kvrouter.sim.calibrate.measured_run import RunMeta, read_json
from kvrouter.sim.traces.read import open_trace


def read_meta(path: Path) -> None:
    read_json(path, RunMeta)


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def device(_folder: Path) -> Path:
    return Path("/dev/zero")


@pytest.mark.parametrize("odd", [fifo, device], ids=["fifo", "device"])
@pytest.mark.parametrize("read", [read_document, open_trace, read_meta])
def test_commands_refuse_files_that_are_not_regular(
    tmp_path: Path, read: Callable[[Path], object], odd: Callable[[Path], Path]
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: it is no regular file"):
        read(odd(tmp_path))


def test_a_folder_is_reported_as_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    (tmp_path / "link").symlink_to(file)
    assert read_regular(tmp_path / "link", bytes_max=3) == b"abc"
    with pytest.raises(OSError, match="it has more than 2 bytes"):
        read_regular(file, bytes_max=2)


def test_run_descriptions_and_traces_have_size_limits(tmp_path: Path) -> None:
    file = tmp_path / "meta.json"
    file.write_bytes(b"[" + b"1," * (4 << 20) + b"1]")
    with pytest.raises(ConfigError, match="it has more than"):
        read_meta(file)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(b"x" * (1 << 26)))
    with pytest.raises(ConfigError, match=r"is longer than \d+ bytes"):
        open_trace(packed)
