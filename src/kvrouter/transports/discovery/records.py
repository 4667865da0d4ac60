"""The port of stores: records of one kind by key, listed, followed, and written over a version.

A record is a worker's card, or a cordon. What a version is each store decides; it differs from one write of a
key to the next.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
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

    async def close(self) -> None:
        """Hold nothing any more; idempotent."""


class ChangeFeed(ABC):
    """Brings the records that a store holds, and every change, in a task."""

    _task: asyncio.Task[None] | None = None
    _has_ended = False

    @abstractmethod
    async def start(self) -> None:
        """Bring what is there, and go on with each change."""

    def end(self) -> None:
        """Bring nothing more; idempotent."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return once nothing runs any more, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait({self._task})


class PolledFeed(ChangeFeed):
    """A feed that asks its store now and then, in a task called ``name``."""

    name: str

    @abstractmethod
    async def ask(self) -> None:
        """Ask the store once, and hand on what it says; also that it cannot be asked."""

    @abstractmethod
    def pause_s(self) -> float:
        """How long to wait before the store is asked again, in seconds."""

    async def hear_no_more(self) -> None:
        """Let go of what the store calls by itself; idempotent."""

    async def start(self) -> None:
        """Ask once, and go on asking."""
        try:
            await self.ask()
        except BaseException:
            await self.hear_no_more()
            raise
        self._task = go_on(self._run(), name=self.name)
        await asyncio.sleep(0)

    async def _run(self) -> None:
        try:
            # A client may lose a cancellation that comes together with an answer: hence the flag.
            while not self._has_ended:
                await asyncio.sleep(self.pause_s())
                await self.ask()
        finally:
            await self.hear_no_more()
