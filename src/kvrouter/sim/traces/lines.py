"""The lines of a trace's file, packed or not, and the errors that name them."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from kvrouter.core.errors import ConfigError

LINE_BYTES_MAX = 1 << 25
"""The longest line that is read."""

GZIP_MAGIC = b"\x1f\x8b"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1. Raises ConfigError."""
    number = 0
    try:
        with path.open("rb") as plain:
            is_packed = plain.read(2) == GZIP_MAGIC
            plain.seek(0)
            with gzip.open(plain) if is_packed else plain as lines:
                while line := lines.readline(LINE_BYTES_MAX + 1):
                    number += 1
                    if len(line) > LINE_BYTES_MAX:
                        wrong_row(path, number, f"is longer than {LINE_BYTES_MAX} bytes")
                    if line.strip():
                        yield number, line
    except EOFError as error:
        raise ConfigError(
            f"{path}: the gzip file is cut short after line {number}", param=str(path)
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"{path}: line {number + 1}: not a whole gzip file: {error}", param=str(path)
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}", param=str(path)) from error


def wrong_row(path: Path, line: int, what: str) -> NoReturn:
    """Raise ConfigError for a row."""
    raise ConfigError(f"{path}:{line}: {what}", param=str(path))
