"""Files that are written whole or not at all."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from kvrouter.core.errors import ConfigError


def check_folder(path: Path) -> None:
    """Raise ConfigError where no file can be written at ``path``, before anything was done for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: {folder} is no folder", param=str(path))
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{path}: cannot be written", param=str(path))


def write_whole(path: Path, content: bytes) -> None:
    """Write the file in the same folder and then move it to its place: no reader ever sees a part of it.

    Raises ConfigError where that fails; what was there before is still there then.
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
