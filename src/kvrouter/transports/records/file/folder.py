"""The folder of one namespace, and operations on its files. All of them block, and run in threads.

A file is written under a temporary name and renamed, so that readers never see half of it. It is renewed by
its modification time; readers compare that only for a change.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.transports.records.store import VersionConflict

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RENEWED_BY_NS = 1_000_000
"""The least step of a modification time: coarse file systems distinguish it too."""


MARKER = ".kvrouter"
"""The file that marks a directory as one of worker cards."""


class Stamp(NamedTuple):
    """Identifies one state of a file."""

    inode: int
    modified_ns: int
    size_bytes: int


class Folder:
    """The folder of one namespace, for this user alone: anyone who can write here can redirect requests."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self._directory = directory
        self.path = directory / namespace

    def open(self) -> None:
        """Create the folder, and its parent, with access for this user alone, where they are missing.

        Raises ConfigError when it exists and is not ours.
        """
        path = self._directory
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            _check(path)
            self._mark()
            path = self.path
            path.mkdir(mode=0o700, exist_ok=True)
            _check(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", param="directory") from error

    def check(self) -> None:
        """Raise ConfigError if other users may write here, OSError if it cannot be read."""
        _check(self._directory)
        _check(self.path)

    def _mark(self) -> None:
        """Mark the directory as ours; raise ConfigError if it holds other files.

        The marker is created before any other file, so a process that sees another file sees the marker too.
        Old markers may be cleaned up; then the cards identify the directory.
        """
        is_empty = not any(self._directory.iterdir())
        marker = self._directory / MARKER
        if marker.exists():
            return
        ours = any(any(self.path.glob(pattern)) for pattern in ("worker-*.json", "cordon-*.json"))
        if not is_empty and not ours:
            raise ConfigError(
                f"{self._directory}: is not empty, and no directory of worker cards", param="directory"
            )
        marker.touch(mode=0o600)

    def replace(self, name: str, content: bytes) -> Stamp:
        """Write a file under ``name`` (``….json``) atomically, replacing the current one. Raises OSError."""
        half = self.path / f".{name.removesuffix('.json')}.{secrets.token_hex(8)}.half"
        file = os.open(half, _WRITE, 0o600)
        try:
            with _naming(half), os.fdopen(file, "wb") as opened:
                opened.write(content)
                opened.flush()
                stamp = stamp_of(os.fstat(opened.fileno()))
            half.replace(self.path / name)
        except OSError:
            half.unlink(missing_ok=True)
            raise
        return stamp


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path}: is no directory", param="directory")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path}: belongs to user {found.st_uid}", param="directory")
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{path}: everybody may write there (chmod o-w it)", param="directory")


def touch(path: Path, stamp: Stamp) -> Stamp:
    """Renew the file that is at ``stamp``, without writing to it; return its new stamp.

    Raises OSError, and VersionConflict where another file took its place.
    """
    file = os.open(path, _READ)
    try:
        if stamp_of(os.fstat(file)) != stamp:
            raise VersionConflict(f"{path} is another by now")
        renewed_ns = max(time.time_ns(), stamp.modified_ns + _RENEWED_BY_NS)
        with _naming(path):
            os.utime(file, ns=(renewed_ns, renewed_ns))
        return stamp_of(os.fstat(file))
    finally:
        os.close(file)


def read_own_file(path: Path, *, bytes_max: int) -> tuple[bytes, Stamp]:
    """Return a file's content and stamp. Raises OSError, and ProtocolError for another user's file or one
    longer than ``bytes_max``.
    """
    file = os.open(path, _READ)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ProtocolError("no file of this user", param="record")
        if found.st_size > bytes_max:
            raise ProtocolError(f"{found.st_size} bytes are more than {bytes_max}", param="record")
        return opened.read(bytes_max + 1), stamp_of(found)


def stamp_of(found: os.stat_result) -> Stamp:
    """Return the stamp of a file."""
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
