"""The files of a recording: compressed, readable by their owner only, rotated, and limited in total."""

import errno
import fcntl
import gzip
import os
import re
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.recording.schema import FILE_SUFFIX, PART_SUFFIX

FILE_NAME = re.compile(r"recording-\d{8}T\d{6}Z-[0-9a-f]{8}-\d{6}\.jsonl\.gz(\.part)?")
LOCK_NAME = ".recording.lock"

Write = Callable[[int, bytes | memoryview], int]
"""As :func:`os.write`: returns how many bytes were written, or raises OSError."""

Head = Callable[[int], bytes]
"""Returns the first lines of a file, by its number in its recording, from 1."""


class RecordingFolder:
    """Writes the files of one recording into a folder, and removes the oldest files of any recording there to
    keep all of them within ``total_bytes``.

    A file is named ``….part`` until it is complete. It holds at most ``file_bytes``, unless its head and the
    lines of one call are longer. One process records in a folder at a time: otherwise the constructor raises
    ConfigError. All methods raise OSError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recording: str,
        file_bytes: int,
        total_bytes: int,
        started_s: float,
        write: Write = os.write,
    ) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._total_bytes = total_bytes
        self._write = write
        began = datetime.fromtimestamp(started_s, UTC).strftime("%Y%m%dT%H%M%SZ")
        self._stem = f"recording-{began}-{recording}"
        self._part = 0
        self._file: int | None = None
        self._path = folder
        self._packed_bytes = 0
        self._lock = _claim(folder)
        try:
            self._earlier = _files_in(folder)
        except OSError as error:
            os.close(self._lock)
            raise _refused(folder, f"cannot be read: {error.strerror or error}") from error

    def add(self, packed: bytes | memoryview, head: Head) -> bool:
        """Write complete lines, compressed as a complete gzip member, so that they are readable even if this
        process dies. When they do not fit the file, begin the next one with ``head``. Return False, with
        nothing written, where they and the head exceed ``total_bytes``.
        """
        if self._file is not None:
            if self._packed_bytes + len(packed) <= self._file_bytes:
                self._put(self._file, packed)
                return True
            self.end()
        begun = searched_member(head(self._part + 1)) + packed
        if len(begun) > self._total_bytes:
            return False
        self._put(self._begin(), begun)
        return True

    def end(self) -> None:
        """Close the file and rename it to its final name; do nothing without a file."""
        if self._file is None:
            return
        file, self._file = self._file, None
        os.close(file)
        whole = self._path.with_name(self._path.name.removesuffix(PART_SUFFIX) + FILE_SUFFIX)
        self._path.rename(whole)
        self._earlier.append((whole, self._packed_bytes))

    def close(self) -> None:
        """Release the folder, and close an unfinished file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.close(self._lock)

    def _begin(self) -> int:
        self._part += 1
        self._path = self._folder / f"{self._stem}-{self._part:06d}{PART_SUFFIX}"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._packed_bytes = 0
        return self._file

    def _put(self, file: int, packed: bytes | memoryview) -> None:
        if os.fstat(file).st_nlink == 0:  # writes to a removed file succeed, and are lost
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written", self._path)
        self._make_room(len(packed))
        rest = memoryview(packed)
        while rest:
            rest = rest[self._write(file, rest) :]
        self._packed_bytes += len(packed)

    def _make_room(self, n_bytes: int) -> None:
        held_bytes = sum(size for _, size in self._earlier) + self._packed_bytes
        while self._earlier and held_bytes + n_bytes > self._total_bytes:
            path, size = self._earlier.pop(0)
            path.unlink(missing_ok=True)
            held_bytes -= size


def searched_member(lines: bytes | memoryview) -> bytes:
    """Return lines as a gzip member, compressed at level 1."""
    return gzip.compress(lines, 1, mtime=0)


def recording_files(folder: Path) -> list[Path]:
    """Return the files of recordings in a folder and its subfolders, by the start of their recordings.

    Raises OSError.
    """
    found = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if FILE_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name, path))


def _files_in(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of earlier recordings with their sizes, the oldest first. Raises OSError."""
    with os.scandir(folder) as entries:
        found = [(Path(each.path), each.stat().st_size) for each in entries if FILE_NAME.fullmatch(each.name)]
    return sorted(found)


def _claim(folder: Path) -> int:
    """Create the folder where it is missing, and lock it; return the lock's descriptor."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # a lock file may exist in a read-only folder
            lock = os.open(folder / LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(folder, f"cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise _refused(folder, "another process records there; each one needs a folder of its own") from error
    return lock


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"recording.folder: {folder}: {why}", param="folder")
