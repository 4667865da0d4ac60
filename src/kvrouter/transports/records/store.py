"""The port of record stores: records of one kind by key, listed, watched, and written by compare-and-set.

A record is a worker's card or a cordon. A key's version differs after each write; each store defines it.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.transports.background import spawn

T = TypeVar("T")
V = TypeVar("V")


class VersionConflict(KvrouterError):
    """The key is at another version than the one to be replaced (compare-and-set failed)."""


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[T]):
    """One kind of record: its name, its keys, and its encoding.

    ``key_of`` returns a record's key, which matches ``key``; ``describe`` names its subject in words. When
    ``continues(held, record)``, the lease of one holds for the other.
    """

    name: str
    key: re.Pattern[str]
    key_of: Callable[[T], str]
    describe: Callable[[T], str]
    param: str
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    continues: Callable[[T, T], bool]
    bytes_max: int
    records_max: int

    def checked(self, key: str, content: bytes) -> T:
        """Return the record in ``content``; raise ProtocolError for an invalid one, or another key's."""
        record = self.decode(content)
        if self.key_of(record) != key:
            raise ProtocolError(f"holds the {self.describe(record)}", param=self.param)
        return record


class Record(NamedTuple, Generic[T, V]):
    """A record with its key and its version in a store."""

    key: str
    value: T
    version: V


class RecordStore(Protocol[T, V]):
    """Stores the records of one kind for the processes that share it.

    Methods raise one of ``errors``; a write that raises may have succeeded when only its answer was lost.
    """

    unit: str
    """What holds one record: "file", "key" or "object"."""

    errors: tuple[type[Exception], ...]

    def reason(self, error: Exception) -> str:
        """Return one of ``errors`` as one line that a person can act on."""

    async def list_all(self) -> list[Record[T, V]]:
        """Return every record. An entry that is no record is left out, and reported once until it is one."""

    async def read(self, key: str) -> tuple[T | None, V | None]:
        """Return the record and its version; (None, None) where there is no entry.

        An entry that is no record is (None, its version).
        """

    async def put(self, value: T) -> None:
        """Write a record, regardless of the current version."""

    async def put_over(self, value: T, over: V | None) -> V:
        """Replace the version ``over`` (None: create); return the new version, also for an unchanged record.

        Raises VersionConflict when the key is at another version.
        """

    async def delete(self, key: str, version: V | None = None) -> None:
        """Delete this version (None: any); idempotent. Raises VersionConflict at another version."""

    async def close(self) -> None:
        """Release all resources; idempotent."""


class ChangeFeed(ABC):
    """A task that delivers the records of a store and every change of them."""

    _task: asyncio.Task[None] | None = None
    _has_ended = False

    @abstractmethod
    async def start(self) -> None:
        """Deliver the present records, and go on with each change."""

    def end(self) -> None:
        """Stop delivering; idempotent."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return once the task has ended, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait({self._task})


class PolledFeed(ChangeFeed):
    """A feed that polls its store, in a task called ``name``."""

    name: str

    @abstractmethod
    async def poll(self) -> None:
        """Poll the store once and pass on the result, or that the store cannot be reached."""

    @abstractmethod
    def pause_s(self) -> float:
        """Seconds to wait before the next poll."""

    async def release(self) -> None:
        """Release the store's subscription; idempotent."""

    async def start(self) -> None:
        """Poll once, and go on polling."""
        try:
            await self.poll()
        except BaseException:
            await self.release()
            raise
        self._task = spawn(self._run(), name=self.name)
        await asyncio.sleep(0)

    async def _run(self) -> None:
        try:
            # A client may lose a cancellation that comes together with an answer, so check a flag too.
            while not self._has_ended:
                await asyncio.sleep(self.pause_s())
                await self.poll()
        finally:
            await self.release()
