"""Atomic file writes: a file is replaced as a whole or not at all."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from kvrouter.core.errors import ConfigError


def check_folder(path: Path) -> None:
    """Raise ConfigError where ``path`` cannot be written, before any work is done for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: {folder} is no folder", param=str(path))
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{path}: cannot be written", param=str(path))


def write_atomic(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder and rename it, so that no reader sees a partial file.

    Raises ConfigError on failure; the former file then stays.
    """
    try:
        with NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}.", delete=False) as part:
            try:
                part.write(content)
                part.close()
                Path(part.name).chmod(0o644)
                Path(part.name).replace(path)
            except OSError:
                Path(part.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}", param=str(path)) from error
