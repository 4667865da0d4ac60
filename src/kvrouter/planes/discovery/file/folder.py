"""One folder of cards: every file operation of the file store. All of it blocks, and runs in threads.

``worker-<id>.json`` holds the record of one worker id. It is written beside and renamed, so that nobody reads
half of it, and renewed by its modification time, whose value says nothing: readers only see that it changed.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.discovery.leases import claim, still_claims
from kvrouter.planes.discovery.port import Gone
from kvrouter.planes.discovery.wire import RECORD_MAX_BYTES, CardRecord, decode_record, encode_record

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RENEWED_BY_NS = 1_000_000
"""The least step of a modification time: what a coarse file system still tells apart."""


MARKER = ".kvrouter"
"""The file by which a directory is known as one of worker cards."""


class Stamp(NamedTuple):
    """What tells one state of a file from the next."""

    inode: int
    modified_ns: int
    size_bytes: int


UNWRITTEN = Stamp(0, 0, 0)
"""The stamp of a record that is still to be written."""


@dataclass(frozen=True, slots=True)
class Held:
    """A card that this process keeps alive, and its file as it was left."""

    record: CardRecord
    stamp: Stamp


class Folder:
    """The cards of one namespace. Belongs to this user alone: whoever may write here may route requests."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self._directory = directory
        self.path = directory / namespace

    def open(self) -> None:
        """Make the folder, for this user alone, where it is missing, but not what its directory lies in.

        Raises ConfigError if it is not ours.
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
        """Raise ConfigError if others may write here, OSError if nobody can look."""
        _check(self._directory)
        _check(self.path)

    def _mark(self) -> None:
        """Mark the directory as ours; raise ConfigError if it is something else's.

        The marker is the first thing there, so whoever sees anything else sees it too. It may be cleared away
        one day, as old files are; then the cards tell.
        """
        is_empty = not any(self._directory.iterdir())
        marker = self._directory / MARKER
        if marker.exists():
            return
        if not is_empty and not any(self.path.glob("worker-*.json")):
            raise ConfigError(
                f"{self._directory}: is not empty, and no directory of worker cards", param="directory"
            )
        marker.touch(mode=0o600)

    def put(self, card: WorkerCard, lease_s: float, held: Held | None = None) -> Held | None:
        """Write the card, of which ``held`` is the last state; None if a newer incarnation has its place."""
        self.open()
        mine = None if held is None else held.record
        record = claim(card, lease_s, self._current(card.worker_id), mine)
        return None if record is None else self._write(record)

    def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn, if it is this incarnation's."""
        current = self._current(worker_id)
        if current is not None and current.card.incarnation == incarnation and not current.withdrawn:
            self._write(CardRecord(current.card, current.lease_s, current.replaced, withdrawn=True))

    def renew(self, held: Held) -> Held | Gone:
        """Renew the lease; a file that is gone is written again. Or return how the card lost its place.

        Where the card changed and cannot be written, the lease of what the file says is renewed, and OSError
        raised.
        """
        path = self.path / card_name(held.record.card.worker_id)
        try:
            file = os.open(path, _READ)
        except FileNotFoundError:
            self.open()
            return self._write(held.record)
        try:
            if stamp_of(os.fstat(file)) == held.stamp:
                renewed_ns = max(time.time_ns(), held.stamp.modified_ns + _RENEWED_BY_NS)
                with _naming(path):
                    os.utime(file, ns=(renewed_ns, renewed_ns))
                return Held(held.record, stamp_of(os.fstat(file)))
        finally:
            os.close(file)
        current = self._current(held.record.card.worker_id)
        record = still_claims(held.record, current)
        if isinstance(record, Gone):
            return record
        try:
            return self._write(record)
        except OSError:
            if current is not None and current.card.incarnation == record.card.incarnation:
                with suppress(OSError):  # of the two the card that cannot be written is to be told
                    os.utime(path, follow_symlinks=False)
            raise

    def _current(self, worker_id: WorkerId) -> CardRecord | None:
        """What is there now. A file of that name that is no record is as good as none: the name is ours."""
        try:
            return read_record(self.path / card_name(worker_id))[0]
        except (FileNotFoundError, ProtocolError):
            return None

    def _write(self, record: CardRecord) -> Held:
        name = card_name(record.card.worker_id)
        half = self.path / f".{name.removesuffix('.json')}.{secrets.token_hex(8)}.half"
        file = os.open(half, _WRITE, 0o600)
        try:
            with _naming(half), os.fdopen(file, "wb") as opened:
                opened.write(encode_record(record))
                opened.flush()
                stamp = stamp_of(os.fstat(opened.fileno()))
            half.replace(self.path / name)
        except OSError:
            half.unlink(missing_ok=True)
            raise
        return Held(record, stamp)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say of an error of the system which file it is about, where the system does not."""
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


def card_name(worker_id: WorkerId) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker_id}.json"


def read_record(path: Path) -> tuple[CardRecord, Stamp]:
    """Read one file.

    Raises OSError, and ProtocolError for what is no record, another user's, or another worker's.
    """
    file = os.open(path, _READ)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ProtocolError("no file of this user", param="record")
        if found.st_size > RECORD_MAX_BYTES:
            raise ProtocolError(f"{found.st_size} bytes are more than {RECORD_MAX_BYTES}", param="record")
        record = decode_record(opened.read(RECORD_MAX_BYTES + 1))
    if path.name != card_name(record.card.worker_id):
        raise ProtocolError(f"holds the card of worker {record.card.worker_id}", param="worker_id")
    return record, stamp_of(found)


def stamp_of(found: os.stat_result) -> Stamp:
    """Return what tells this state of the file from others."""
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
