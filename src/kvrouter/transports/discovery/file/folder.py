"""A folder of cards: every file operation of the store. All of it blocks, and runs in threads.

``worker-<id>.json`` holds the record of one worker id. It is written to another file and renamed, so that
nobody reads half of it, and renewed by its modification time, whose value says nothing: readers only see that
it changed. ``cordon-<digest>.json`` holds a cordon, and is no card.
"""

import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.discovery.card_tracker import claim, still_claims
from kvrouter.transports.discovery.port import Gone
from kvrouter.transports.discovery.wire import RECORD_MAX_BYTES, CardRecord, decode_record, encode_record

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RENEWED_BY_NS = 1_000_000
"""The least step of a modification time: what a coarse file system still distinguishes."""


MARKER = ".kvrouter"
"""The file by which a directory is known as one of worker cards."""


class Stamp(NamedTuple):
    """What distinguishes one state of a file from the next."""

    inode: int
    modified_ns: int
    size_bytes: int


UNWRITTEN = Stamp(0, 0, 0)
"""The stamp of a record that is still to be written."""


@dataclass(frozen=True, slots=True)
class HeldCard:
    """A card that this process keeps alive, and its file as it was left."""

    record: CardRecord
    stamp: Stamp


class Folder:
    """The cards of one namespace. Belongs to this user alone: who may write here may route requests."""

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
        """Raise ConfigError if others may write here, OSError if nobody can read."""
        _check(self._directory)
        _check(self.path)

    def _mark(self) -> None:
        """Mark the directory as ours; raise ConfigError if it is something else's.

        The marker is the first thing there, so a process that sees anything else sees it too. It may be
        removed later, as old files are; then the cards show it.
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

    def put(self, card: WorkerCard, lease_s: float, held: HeldCard | None = None) -> HeldCard | None:
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

    def renew(self, held: HeldCard) -> HeldCard | Gone:
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
                return HeldCard(held.record, stamp_of(os.fstat(file)))
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
                with suppress(OSError):  # of the two errors the card that cannot be written is reported
                    os.utime(path, follow_symlinks=False)
            raise

    def _current(self, worker_id: WorkerId) -> CardRecord | None:
        """What is there now. A file of that name that is no record is as good as none: the name is ours."""
        try:
            return read_record(self.path / card_name(worker_id))[0]
        except (FileNotFoundError, ProtocolError):
            return None

    def _write(self, record: CardRecord) -> HeldCard:
        return HeldCard(record, self.replace(card_name(record.card.worker_id), encode_record(record)))

    def replace(self, name: str, content: bytes) -> Stamp:
        """Write a whole file under ``name``, ``….json``, in place of what is there. Raises OSError."""
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
    content, stamp = read_own_file(path, bytes_max=RECORD_MAX_BYTES)
    record = decode_record(content)
    if path.name != card_name(record.card.worker_id):
        raise ProtocolError(f"holds the card of worker {record.card.worker_id}", param="worker_id")
    return record, stamp


def read_own_file(path: Path, *, bytes_max: int) -> tuple[bytes, Stamp]:
    """Return what a file holds. Raises OSError, and ProtocolError for another user's, or a longer one."""
    file = os.open(path, _READ)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ProtocolError("no file of this user", param="record")
        if found.st_size > bytes_max:
            raise ProtocolError(f"{found.st_size} bytes are more than {bytes_max}", param="record")
        return opened.read(bytes_max + 1), stamp_of(found)


def stamp_of(found: os.stat_result) -> Stamp:
    """Return what distinguishes this state of the file from others."""
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)


FILES_MAX = 16_384
"""How many files of one folder are read; that there are more is reported."""

_CARD_NAME = re.compile(r"worker-(0|[1-9][0-9]{0,18})\.json")
_HALF_NAME = re.compile(r"\.(worker-[0-9]{1,19}|cordon-[0-9a-f]{32})\.[0-9a-f]{16}\.half")
"""A file that is being written, or whose writer died."""

CORDON_NAME = re.compile(r"cordon-[0-9a-f]{32}\.json")


class Scan(NamedTuple):
    """One scan: the records in the order of their worker ids, and what else is there, of that one scan."""

    looked_at_s: float
    records: list[tuple[CardRecord, Stamp]]
    troubles: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file in one state. ``record`` is None where there is none to be read, and ``trouble`` says why."""

    stamp: Stamp
    since_s: float
    record: CardRecord | None
    trouble: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.trouble is None


class Scanner:
    """Reads only the files that changed; removes those of ours that nobody renewed for very long.

    One scans at a time; all watchers of a process share it, so that one of them is given what is no card.
    """

    def __init__(self, folder: Folder, *, remove_after_s: float) -> None:
        self._folder = folder
        self._remove_after_s = remove_after_s
        self._seen: dict[str, _Seen] = {}
        self._reported: set[str] = set()
        self._scanning = threading.Lock()

    def look(self) -> Scan:
        """Return what is there now.

        Raises OSError when the folder cannot be read, ConfigError when it is not this user's alone.
        """
        with self._scanning:
            return self._look()

    def _look(self) -> Scan:
        now = time.monotonic()
        self._folder.check()
        with os.scandir(self._folder.path) as entries:
            names = (entry.name for entry in entries if not CORDON_NAME.fullmatch(entry.name))
            found = list(islice(names, FILES_MAX + 1))
        before, self._seen = self._seen, {}
        for name in found[:FILES_MAX]:
            seen = self._see(name, before.get(name), now)
            if seen is not None:
                self._seen[name] = seen
        troubles = [(name, seen.trouble) for name, seen in self._seen.items() if seen.trouble is not None]
        if len(found) > FILES_MAX:
            troubles.append(("", f"more than {FILES_MAX} files: the others are not looked at"))
        news = [trouble for trouble in troubles if trouble[0] not in self._reported]
        self._reported = {name for name, _ in troubles}
        self._remove_old(now)
        records = [(seen.record, seen.stamp) for seen in self._seen.values() if seen.record is not None]
        records.sort(key=lambda pair: pair[0].card.worker_id)
        return Scan(now, records, [(str(self._folder.path / name), why) for name, why in news])

    def _see(self, name: str, before: _Seen | None, now: float) -> _Seen | None:
        """Read one file; None when it vanished meanwhile."""
        path = self._folder.path / name
        try:
            stamp = stamp_of(path.lstat())
            if before is not None and before.stamp == stamp:
                return before
            if _HALF_NAME.fullmatch(name):
                return _Seen(stamp, now, None)
            if not _CARD_NAME.fullmatch(name):
                return _Seen(stamp, now, None, "no card of a worker")
            record, stamp = read_record(path)
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            return _Seen(stamp, now, None, str(error))
        return _Seen(stamp, now, record)

    def _remove_old(self, now: float) -> None:
        for name, seen in tuple(self._seen.items()):
            if not seen.is_ours or now - seen.since_s <= self._remove_after_s:
                continue
            path = self._folder.path / name
            try:
                if stamp_of(path.lstat()) == seen.stamp:
                    path.unlink()
            except OSError:
                continue
