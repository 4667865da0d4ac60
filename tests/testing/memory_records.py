"""A store of records in one process: the laws of the port, without files and servers."""

import asyncio
import time
from typing import Generic, TypeVar

from kvrouter.transports.records.encoding import CardRecord
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.store import ChangeFeed, PolledFeed, Record, RecordKind, VersionConflict

T = TypeVar("T")


class MemoryRecords(Generic[T]):
    """Keeps the records of ``kind``. A version is the number of a write."""

    unit = "record"
    errors: tuple[type[Exception], ...] = (ConnectionError,)

    def __init__(self, kind: RecordKind[T]) -> None:
        self._kind = kind
        self._held: dict[str, Record[T, int]] = {}
        self._writes = 0

    def reason(self, error: Exception) -> str:
        """What ``error`` says."""
        return str(error)

    async def list_all(self) -> list[Record[T, int]]:
        """Return every record."""
        return list(self._held.values())

    def changes(self: "MemoryRecords[CardRecord]", watch: LeasedWatch[int]) -> ChangeFeed:
        """Return what looks at the records for ``watch``."""
        return _Looks(self, watch)

    async def read(self, key: str) -> tuple[T | None, int | None]:
        """Return what is there."""
        held = self._held.get(key)
        return (None, None) if held is None else (held.value, held.version)

    async def put(self, value: T) -> None:
        """Keep a record, in place of what is there."""
        self._writes += 1
        key = self._kind.key_of(value)
        self._held[key] = Record(key, value, self._writes)

    async def put_over(self, value: T, over: int | None) -> int:
        """Keep a record in place of a version."""
        self._check(self._kind.key_of(value), over)
        await self.put(value)
        return self._writes

    async def delete(self, key: str, version: int | None = None) -> None:
        """Keep a record no longer; idempotent."""
        if version is not None and key in self._held:
            self._check(key, version)
        self._held.pop(key, None)

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return after a part of the lease."""
        await asyncio.sleep(lease_s / 3)

    async def close(self) -> None:
        """Nothing is held."""

    def _check(self, key: str, version: int | None) -> None:
        held = self._held.get(key)
        if version != (None if held is None else held.version):
            raise VersionConflict(f"{key} is another by now")


class _Looks(PolledFeed):
    name = "records: watch memory"

    def __init__(self, store: MemoryRecords[CardRecord], watch: LeasedWatch[int]) -> None:
        self._store, self._watch = store, watch

    def pause_s(self) -> float:
        return 0.02

    async def poll(self) -> None:
        now, records = time.monotonic(), await self._store.list_all()
        self._watch.check(now)
        for record in records:
            self._watch.take(record)
        self._watch.settle(now, {record.key for record in records})
