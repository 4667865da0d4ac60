"""Atomic file writes: a file is replaced as a whole or not at all."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from kvrouter.core.errors import ConfigError

OPEN_FILES = ("/dev/fd/", "/dev/stderr", "/dev/stdout", "/proc/")
"""The beginnings of paths of files that a process has open: its output may be one."""


def check_folder(path: Path) -> None:
    """Raise ConfigError where ``path`` cannot be written, before any work is done for it."""
    folder = _whole(path).parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: {folder} is no folder", param=str(path))
    if path.is_dir() or not os.access(path if _is_special(path) else folder, os.W_OK):
        raise ConfigError(f"{path}: cannot be written", param=str(path))


def write_atomic(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder and rename it, so that no reader sees a partial file. A link
    stays, and its target is replaced; a device, a pipe and an open file stay, and are written to.

    Raises ConfigError on failure; the former file then stays.
    """
    try:
        if _is_special(path):
            with path.open("ab") as file:
                file.write(content)
            return
        whole = _whole(path)
        with NamedTemporaryFile(dir=whole.parent, prefix=f".{whole.name}.", delete=False) as part:
            try:
                part.write(content)
                part.close()
                Path(part.name).chmod(0o644)
                Path(part.name).replace(whole)
            except OSError:
                Path(part.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}", param=str(path)) from error


def _is_special(path: Path) -> bool:
    """Whether the path is of a device, a pipe, a socket, or of a file that a process has open."""
    is_open = str(path.absolute()).startswith(OPEN_FILES)
    return path.exists() and not path.is_dir() and (is_open or not path.is_file())


def _whole(path: Path) -> Path:
    """Return where the links of a path lead. ``Path.resolve`` raises no OSError for those that go round."""
    return Path(os.path.realpath(path))
