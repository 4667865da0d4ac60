"""The port of stores: records of one kind by key, listed, followed, and written over a version.

A record is a worker's card, or a cordon. What a version is each store decides; it differs from one write of a
key to the next.
"""

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.transports.background import go_on

T = TypeVar("T")
V = TypeVar("V")


class OtherWrote(KvrouterError):
    """The store holds another version than the one to be written over."""


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[T]):
    """What the records of one kind are called, and how they are written and read.

    ``key_of`` is the key of a record, which matches ``key``; ``place_of`` says whose it is, in words. Whether
    one record goes on with another says ``goes_on``: the lease of the one holds for the other.
    """

    name: str
    key: re.Pattern[str]
    key_of: Callable[[T], str]
    place_of: Callable[[T], str]
    param: str
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    goes_on: Callable[[T, T], bool]
    bytes_max: int
    records_max: int

    def checked(self, key: str, content: bytes) -> T:
        """Return the record kept under ``key``; raise ProtocolError for what is none, or another's."""
        record = self.decode(content)
        if self.key_of(record) != key:
            raise ProtocolError(f"holds the {self.place_of(record)}", param=self.param)
        return record


class Record(NamedTuple, Generic[T, V]):
    """A record as a store holds it."""

    key: str
    value: T
    version: V


class Follower(Protocol[T, V]):
    """Hears what a store holds. Times are seconds of the monotonic clock of this process."""

    def look(self, now: float) -> None:
        """The store is looked at, or has said that it is there."""

    def next_end(self) -> float | None:
        """When a record is doubtful next: it has to be read again by then; None while none will be."""

    def overdue(self, now: float) -> list[str]:
        """Return the keys of records that are to be read again, before they are believed to be over."""

    def __contains__(self, key: str) -> bool: ...

    def take(self, record: Record[T, V]) -> None:
        """Take a record as it is now. Raises ProtocolError for one more than are followed."""

    def drop(self, key: str) -> None:
        """The store holds nothing any more under this key."""

    def settle(self, asked_at: float, present: Container[str] | None = None) -> None:
        """What was there at ``asked_at`` was taken, of all records or of those that were overdue. ``present``
        are the keys of all, where all were read.
        """

    def drop_before(self, then: float) -> None:
        """The store drops by itself what was not written since ``then``."""

    def lose(self, why: str) -> None:
        """The store cannot be asked."""

    def regain(self) -> None:
        """The store can be asked again, or is another one."""

    async def tidy(self, now: float) -> None:
        """Remove what nobody has written for long."""


class ChangeFeed(Protocol):
    """Brings a store's changes to one follower."""

    async def start(self) -> None:
        """Bring what is there, and go on with each change."""

    def end(self) -> None:
        """Bring nothing more; idempotent."""

    async def ended(self) -> None:
        """Return once nothing runs any more, after :meth:`end`."""


class RecordStore(Protocol[T, V]):
    """Keeps the records of one kind, for the processes that share it.

    Methods raise one of ``errors`` when they cannot do what is asked; a write that raises may have been done
    all the same where only its answer was lost.
    """

    unit: str
    """What holds one record: a file, a key, an object."""

    errors: tuple[type[Exception], ...]

    def reason(self, error: Exception) -> str:
        """What one of ``errors`` says, in a line that a person can act on."""

    async def list_all(self) -> list[Record[T, V]]:
        """Return every record. What is none is reported, once until it is one, and left out."""

    def changes(self, follower: Follower[T, V]) -> ChangeFeed:
        """Return what brings ``follower`` the records that are there, and every change."""

    async def read(self, key: str) -> tuple[T | None, V | None]:
        """Return what is there and its version; no version where nothing is.

        What is no record is as good as none: the place is its own.
        """

    async def put(self, value: T) -> None:
        """Write a record, over whatever is there."""

    async def put_over(self, value: T, over: V | None) -> V:
        """Write over a version, or where nothing is; return the new version. A record that is written again
        as it is has a new version, too.

        Raises OtherWrote when something else is there.
        """

    async def delete(self, key: str, version: V | None = None) -> None:
        """Delete this version, or whatever is there; idempotent. Raises OtherWrote when another is there."""

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return when records whose lease is ``lease_s`` seconds are to be written again; ``failures`` are
        those of the last time.
        """

    async def close(self) -> None:
        """Hold nothing any more; idempotent."""


class PolledFeed(ABC):
    """A feed that asks its store now and then, in a task called ``name``."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def ask(self) -> None:
        """Ask the store once, and hand on what it says; also that it cannot be asked."""

    @abstractmethod
    def pause_s(self) -> float:
        """How long to wait before the store is asked again, in seconds."""

    async def hear_no_more(self) -> None:  # noqa: B027 - most stores call nothing
        """Let go of what the store calls by itself; idempotent."""

    async def start(self) -> None:
        """Ask once, and go on asking."""
        try:
            await self.ask()
        except BaseException:
            await self.hear_no_more()
            raise
        self._task = go_on(self._run(), name=self._name)
        await asyncio.sleep(0)

    def end(self) -> None:
        """Ask no more; idempotent."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return once nothing runs any more, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            # A client may lose a cancellation that comes together with an answer: hence the flag.
            while not self._has_ended:
                await asyncio.sleep(self.pause_s())
                await self.ask()
        finally:
            await self.hear_no_more()


LIST_PAUSE_LEAST_S = 0.005
"""The shortest pause between two lists."""


class ListFeed(PolledFeed, Generic[T, V]):
    """A feed of a store that calls nobody: lists every ``every_s`` seconds, and once more when a lease is
    about to run out.
    """

    def __init__(
        self, store: RecordStore[T, V], follower: Follower[T, V], *, every_s: float, name: str
    ) -> None:
        super().__init__(name=name)
        self._store = store
        self._follower = follower
        self._every_s = every_s
        self._is_lost = False

    def pause_s(self) -> float:
        """Until a lease runs out, at most ``every_s``."""
        end = self._follower.next_end()
        pause_s = self._every_s if end is None else min(self._every_s, end - time.monotonic())
        return max(pause_s, LIST_PAUSE_LEAST_S)

    async def ask(self) -> None:
        """List, and hand on what is there."""
        follower, now = self._follower, time.monotonic()
        try:
            records = await self._store.list_all()
        except self._store.errors as error:
            self._is_lost = True
            follower.lose(self._store.reason(error))
            return
        if self._is_lost:
            self._is_lost = False
            follower.regain()
        follower.look(now)
        for record in records:
            follower.take(record)
        follower.settle(now, {record.key for record in records})
        await follower.tidy(now)
