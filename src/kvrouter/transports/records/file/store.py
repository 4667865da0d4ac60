"""Records as files of a directory: ``worker-<id>.json`` for cards, ``cordon-<digest>.json`` for cordons."""

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.transports.records.card_tracker import RENEWALS_PER_LEASE, StoreRefusals, TroubleSink
from kvrouter.transports.records.encoding import CORDONS, CardRecord
from kvrouter.transports.records.file.folder import Folder, Stamp, read_own_file, stamp_of, touch
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.store import ChangeFeed, PolledFeed, Record, RecordKind, VersionConflict

LOOK_LEAST_S = 0.005
"""The shortest pause between two scans."""

POLL_S = 0.5
"""How often a watcher scans, in seconds; four times in a lease that is shorter."""

HALF_STAYS_S = 600.0
"""How long a temporary file of a writer that died is kept."""

_HALF_NAME = re.compile(r"\.(worker-[0-9]{1,19}|cordon-[0-9a-f]{32})\.[0-9a-f]{16}\.half")
"""A temporary file: being written, or left by a writer that died."""

_CORDON_NAME = re.compile(rf"{CORDONS.name}-({CORDONS.key.pattern})\.json")

T = TypeVar("T")


class OneThread:
    """Runs blocking calls in one thread, in order: a call that hangs blocks that thread, and no caller.

    A call that does not return within ``answer_s`` seconds raises TimeoutError, which is an OSError.
    """

    def __init__(self, what: str, *, answer_s: float) -> None:
        self._what = what
        self._answer_s = answer_s
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="discovery")
        self._has_come_back: Callable[[], bool] | None = None
        """Whether the call that timed out has returned."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread; return its result, or raise its exception."""
        async with self._turn:
            if self._has_come_back is not None and not self._has_come_back():
                raise TimeoutError(f"{self._what} does not answer")
            job = self._thread.submit(work)
            waiting = asyncio.wrap_future(job)
            # asyncio.wait_for loses a cancellation that comes as the work ends: close would never return.
            done, _ = await asyncio.wait({waiting}, timeout=self._answer_s)
            if done:
                return waiting.result()
            if not job.cancel():
                self._has_come_back = job.done
            waiting.cancel()
            raise TimeoutError(f"{self._what} did not answer within {self._answer_s:g} s")

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _FileState(Generic[T]):
    """A file as last scanned. Without a ``record``, ``trouble`` is the reason, "" for a temporary file."""

    stamp: Stamp
    since_s: float
    record: Record[T, Stamp] | None = None
    trouble: str = ""


class FileRecords(Generic[T]):
    """Keeps the records of ``kind`` as files of ``folder``; a version is a :class:`Stamp`.

    A scan reads only files that changed. ``is_host``: the folder was made for these records, so it reports
    other files to ``on_refused``, removes temporary files after ``half_stays_s`` seconds, and a missing
    folder means an unreachable store; without ``is_host`` a missing folder is empty. ``what`` names the
    folder in errors. All watches of a process share one instance, so that a file is reported once.
    """

    unit = "file"
    errors: tuple[type[Exception], ...] = (OSError, ConfigError)

    def __init__(
        self,
        kind: RecordKind[T],
        folder: Folder,
        *,
        is_host: bool,
        what: str,
        answer_s: float,
        on_refused: TroubleSink,
        poll_s: float = POLL_S,
        half_stays_s: float = HALF_STAYS_S,
    ) -> None:
        self._kind = kind
        self.folder = folder
        self._is_host = is_host
        self._refusals = StoreRefusals(on_refused)
        self.poll_s = poll_s
        self._half_stays_s = half_stays_s
        self._name = re.compile(rf"{kind.name}-({kind.key.pattern})\.json")
        self._reading = OneThread(what, answer_s=answer_s)
        self._writing = OneThread(what, answer_s=answer_s)
        self._file_states: dict[str, _FileState[T]] = {}
        self._reported: set[str] = set()

    def reason(self, error: Exception) -> str:
        """Return ``error`` as one line that a person can act on."""
        return error.message if isinstance(error, ConfigError) else str(error)

    async def open(self) -> None:
        """Create the folder where it is missing. Raises ConfigError if it is not ours."""
        await self._writing.run(self.folder.open)

    async def list_all(self) -> list[Record[T, Stamp]]:
        """Return every record, in the order of their keys."""
        found = await self._reading.run(self._scan)
        troubles = {name: state.trouble for name, state in found.items() if state.trouble}
        for name in self._reported - troubles.keys():
            self._refusals.forget(name)
        for name, why in troubles.items():
            self._refusals.report(name, str(self.folder.path / name), why)
        self._reported = set(troubles)
        records = [state.record for state in found.values() if state.record is not None]
        return sorted(records, key=lambda record: (len(record.key), record.key))

    def changes(self: "FileRecords[CardRecord]", watch: LeasedWatch[Stamp]) -> ChangeFeed:
        """Return a feed that scans the folder for ``watch``."""
        return _ScanFeed(self, watch)

    def deliver(self, record: Record[T, Stamp], take: Callable[[Record[T, Stamp]], None]) -> None:
        """Pass a record to ``take``; report one that it does not take, because there are too many."""
        try:
            take(record)
        except ProtocolError as error:
            self._refusals.report(record.key, str(self._path(record.key)), error.message)
        else:
            self._refusals.forget(record.key)

    async def read(self, key: str) -> tuple[T | None, Stamp | None]:
        """Return the record and its version; (None, its version) for a file that holds no record."""
        return await self._writing.run(lambda: self._read(key))

    async def put(self, value: T) -> None:
        """Write a record, regardless of the current version."""

        def write() -> None:
            self.folder.open()
            self._replace(value)

        await self._writing.run(write)

    async def put_over(self, value: T, over: Stamp | None) -> Stamp:
        """Replace the version ``over`` (None: create). An unchanged record is renewed without writing, which
        needs no disk space; where a changed one cannot be written, the file that it continues is renewed.
        """
        return await self._writing.run(lambda: self._put_over(value, over))

    async def delete(self, key: str, version: Stamp | None = None) -> None:
        """Delete this version of a file (None: any); idempotent."""

        def unlink() -> None:
            path = self._path(key)
            with suppress(FileNotFoundError):
                self.folder.check()
                if version is not None and stamp_of(path.lstat()) != version:
                    raise VersionConflict(f"{path} is another by now")
                path.unlink()

        await self._writing.run(unlink)

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:  # noqa: ARG002 - a write is cheap
        """Sleep for a third of ``lease_s``."""
        await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)

    async def close(self) -> None:
        """Stop the threads; idempotent."""
        self._reading.close()
        self._writing.close()

    # In the threads

    def _path(self, key: str) -> Path:
        return self.folder.path / f"{self._kind.name}-{key}.json"

    def _read(self, key: str) -> tuple[T | None, Stamp | None]:
        path = self._path(key)
        try:
            stamp = stamp_of(path.lstat())
            content, stamp = read_own_file(path, bytes_max=self._kind.bytes_max)
            return self._kind.checked(key, content), stamp
        except FileNotFoundError:
            return None, None
        except ProtocolError:
            return None, stamp

    def _replace(self, value: T) -> Stamp:
        return self.folder.replace(self._path(self._kind.key_of(value)).name, self._kind.encode(value))

    def _put_over(self, value: T, over: Stamp | None) -> Stamp:
        if over is None:
            self.folder.open()
        held, stamp = self._read(self._kind.key_of(value))
        path = self._path(self._kind.key_of(value))
        if stamp != over:
            raise VersionConflict(f"{path} is another by now")
        if stamp is not None and held == value:
            return touch(path, stamp)
        try:
            return self._replace(value)
        except OSError:
            if stamp is not None and held is not None and self._kind.continues(held, value):
                with suppress(OSError, VersionConflict):  # the record that cannot be written is reported
                    touch(path, stamp)
            raise

    def _scan(self) -> dict[str, _FileState[T]]:
        """Scan the folder and read the files that changed."""
        now = time.monotonic()
        found: dict[str, _FileState[T]] = {}
        try:
            self.folder.check()
            with os.scandir(self.folder.path) as entries:
                names = list(islice(self._names(entries), self._kind.records_max + 1))
        except FileNotFoundError:
            if self._is_host:
                raise
            names = []
        for name in names[: self._kind.records_max]:
            state = self._state_of(name, now)
            if state is not None:
                found[name] = state
        if len(names) > self._kind.records_max:
            why = f"more than {self._kind.records_max} files: the others are not looked at"
            found[""] = _FileState(Stamp(0, 0, 0), now, trouble=why)
        self._file_states = found
        return found

    def _names(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[str]:
        for entry in entries:
            if (
                _CORDON_NAME.fullmatch(entry.name) is None
                if self._is_host
                else self._name.fullmatch(entry.name)
            ):
                yield entry.name

    def _state_of(self, name: str, now: float) -> _FileState[T] | None:
        """Return the state of one file; None when it vanished, or was removed here."""
        path, before = self.folder.path / name, self._file_states.get(name)
        try:
            stamp = stamp_of(path.lstat())
        except FileNotFoundError:
            return None
        try:
            if before is None or before.stamp != stamp:
                before = self._new_state(name, stamp, now)
            is_half = before.record is None and not before.trouble
            if is_half and now - before.since_s > self._half_stays_s:
                path.unlink()
                return None
        except FileNotFoundError:
            return None
        except OSError as error:
            return _FileState(stamp, now, trouble=str(error))
        return before

    def _new_state(self, name: str, stamp: Stamp, now: float) -> _FileState[T]:
        if _HALF_NAME.fullmatch(name):
            return _FileState(stamp, now)
        named = self._name.fullmatch(name)
        if named is None:
            return _FileState(stamp, now, trouble="no card of a worker")
        try:
            content, stamp = read_own_file(self.folder.path / name, bytes_max=self._kind.bytes_max)
            record = Record(named[1], self._kind.checked(named[1], content), stamp)
        except ProtocolError as error:
            return _FileState(stamp, now, trouble=str(error))
        return _FileState(stamp, now, record)


class _ScanFeed(PolledFeed):
    """Scans every ``poll_s`` seconds, and when a lease is about to expire."""

    name = "discovery: watch a folder"

    def __init__(self, store: FileRecords[CardRecord], watch: LeasedWatch[Stamp]) -> None:
        self._store = store
        self._watch = watch
        self._is_lost = False

    async def start(self) -> None:
        """Scan once, and go on scanning. Raises ConfigError for a folder that is not ours."""
        await self._store.open()
        await super().start()

    def pause_s(self) -> float:
        """Return the seconds until the next lease expires, at most ``poll_s``."""
        end = self._watch.next_end()
        pause_s = self._store.poll_s if end is None else min(self._store.poll_s, end - time.monotonic())
        return max(pause_s, LOOK_LEAST_S)

    async def poll(self) -> None:
        """Scan, and pass the records to the watch."""
        watch, now = self._watch, time.monotonic()
        try:
            records = await self._store.list_all()
        except self._store.errors as error:
            self._is_lost = True
            watch.lose(self._store.reason(error))
            return
        if self._is_lost:
            self._is_lost = False
            watch.regain()
        watch.check(now)
        for record in records:
            self._store.deliver(record, watch.take)
        watch.settle(now, {record.key for record in records})
        await watch.tidy(now)
