"""The snapshots of one component: a key that names the valid one, and its objects.

The key is the one place where anything changes hands: it is only ever written by compare-and-set, and it
names both the valid snapshot and the replica that takes the next one. A replica that lost the key to another
one, by being too slow, finds out at its next write, and its snapshot never becomes valid.

The key and every object are sealed, each for its own name; an object's name is never used again. A key that
does not open, a stranger's or one sealed with another token, is as good as none, and is written over.
"""

import asyncio
import base64
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from nats.js import JetStreamContext, api
from nats.js.errors import (
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NotFoundError,
    ObjectNotFoundError,
)
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvSnapshot
from kvrouter.core.ids import Epoch, EventId, WorkerRank
from kvrouter.core.json import decoded, unpacked
from kvrouter.transports.events.jetstream.stream import EventStream, LaneNames, StreamReading
from kvrouter.transports.events.wire import EVENT_TIMES, decode_snapshot
from kvrouter.transports.message_auth import MessageAuth

if TYPE_CHECKING:
    from typing_extensions import Buffer


KEY = "latest"

OBJECT_MAX_BYTES = 1 << 30
"""The longest object that is read: a part holds a few ranks, and ten million blocks are a quarter of it."""

OBJECT_TIMEOUT_S = 10.0
"""The longest that one object may take to be read or written."""


class Claim(msgspec.Struct, frozen=True):
    """The value of the key: the valid snapshot, what it covers, and who takes the next one.

    ``snapshot`` "" is none; ``stream`` and ``sequence`` are the stream and the sequence in it up to which the
    snapshot knows everything. ``holder`` "" is nobody.
    """

    snapshot: str = ""
    stream: str = ""
    sequence: int = 0
    holder: str = ""


class HeldRank(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a snapshot: its epoch and next id, and where its blocks are: ``size`` bytes of a part."""

    rank: WorkerRank
    epoch: Epoch
    next_event_id: EventId
    part: int
    start: int
    size: int


class Revised(NamedTuple):
    """A claim and the revision of the key that it has; 0 when the key is not there."""

    claim: Claim
    revision: int


class Overtaken(Exception):
    """Another replica wrote the key first."""


class ComponentSnapshots:
    """The key and the objects of one component. Methods raise what the client does, in bounded time.

    ``on_refused`` hears of a key that is not ours.
    """

    def __init__(
        self,
        jetstream: JetStreamContext,
        names: LaneNames,
        *,
        seal: MessageAuth,
        on_refused: Callable[[str], None],
        replicas: int,
    ) -> None:
        self._jetstream = jetstream
        self._names = names
        self._seal = seal
        self._on_refused = on_refused
        self._replicas = replicas
        self._keys: KeyValue | None = None
        self._objects: ObjectStore | None = None

    # The key

    async def claim(self) -> Revised:
        """The key as it is now; one that is not ours names no snapshot and nobody."""
        keys = await self._open_keys()
        try:
            entry = await keys.get(KEY)
        except KeyNotFoundError as error:
            deleted = error.entry
            return Revised(Claim(), 0 if deleted is None else deleted.revision or 0)
        revision = entry.revision or 0
        try:
            body = self._seal.opened(self._place(KEY), entry.value or b"")
            return Revised(decoded(_claim, body, "claim"), revision)
        except ProtocolError as error:
            self._on_refused(f"snapshot key of {self._names.component}: {error.message}")
            return Revised(Claim(), revision)

    async def write(self, claim: Claim, *, over: int) -> int:
        """Write the key over its revision ``over``; return the new one. Raises :class:`Overtaken`."""
        keys = await self._open_keys()
        value = self._seal.seal(self._place(KEY), msgspec.json.encode(claim))
        try:
            return await keys.update(KEY, value, last=over)
        except KeyWrongLastSequenceError as error:
            raise Overtaken(f"the key is no more at revision {over}") from error

    # The objects

    async def put(self, name: str, body: bytes) -> None:
        """Store an object."""
        objects = await self._open_objects()
        async with asyncio.timeout(OBJECT_TIMEOUT_S):
            # In a thread: objects are large, and so is what the MAC of one takes.
            await objects.put(name, await asyncio.to_thread(self._seal.seal, self._place(name), body))

    async def get(self, name: str) -> memoryview:
        """Read an object; raise NotFoundError when it is gone, ProtocolError when it is not ours."""
        objects = await self._open_objects()
        body = _Bounded()
        async with asyncio.timeout(OBJECT_TIMEOUT_S):
            try:
                await objects.get(name, writeinto=body)
            except (AttributeError, TypeError, ValueError) as error:
                # The client believes whatever is written about an object, and anybody may have written it.
                raise ProtocolError(
                    f"object {name}: what is written about it: {error}", param="object"
                ) from error
            return await asyncio.to_thread(self._seal.opened, self._place(name), body.getbuffer())

    async def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone are no mistake."""
        objects = await self._open_objects()
        for name in names:
            with suppress(ObjectNotFoundError):
                await objects.delete(name)
            # The record that there was an object goes too: names are never used again.
            token = base64.urlsafe_b64encode(name.encode()).decode()
            await self._jetstream.purge_stream(f"OBJ_{self._names.bucket}", subject=self._meta_subject(token))

    async def objects(self) -> list[str]:
        """The names of all objects; what no name of ours could be is left out."""
        await self._open_objects()
        prefix = self._meta_subject("")
        info = await self._jetstream.stream_info(f"OBJ_{self._names.bucket}", subjects_filter=f"{prefix}>")
        names = []
        for subject in info.state.subjects or ():
            with suppress(ValueError):
                names.append(base64.urlsafe_b64decode(subject.removeprefix(prefix)).decode())
        return names

    def _place(self, name: str) -> str:
        """What the key or an object of this name is sealed for."""
        return f"{self._names.bucket} {name}"

    def _meta_subject(self, token: str) -> str:
        """Where the object store keeps what it knows of an object."""
        return f"$O.{self._names.bucket}.M.{token}"

    async def _open_keys(self) -> KeyValue:
        if self._keys is None:
            bucket = self._names.bucket
            try:
                self._keys = await self._jetstream.key_value(bucket)
            except BucketNotFoundError:
                config = api.KeyValueConfig(bucket=bucket, history=1, replicas=self._replicas)
                self._keys = await self._jetstream.create_key_value(config)
        return self._keys

    async def _open_objects(self) -> ObjectStore:
        if self._objects is None:
            bucket = self._names.bucket
            try:
                self._objects = await self._jetstream.object_store(bucket)
            except BucketNotFoundError:
                config = api.ObjectStoreConfig(replicas=self._replicas)
                self._objects = await self._jetstream.create_object_store(bucket, config)
        return self._objects


def part_name(snapshot: str, number: int) -> str:
    """What the object of a snapshot's part is called."""
    return f"{snapshot}/part-{number}"


def ranks_name(snapshot: str) -> str:
    """What the object that lists a snapshot's ranks is called."""
    return f"{snapshot}/ranks"


def is_of(snapshot: str, name: str) -> bool:
    """Whether the object ``name`` belongs to ``snapshot``."""
    return name.startswith(f"{snapshot}/")


def encode_ranks(ranks: Sequence[HeldRank]) -> bytes:
    """Return the list of a snapshot's ranks as msgpack."""
    return msgspec.msgpack.encode(ranks)


def decode_ranks(body: memoryview) -> dict[WorkerRank, HeldRank]:
    """Return a snapshot's ranks; raise ProtocolError."""
    return {held.rank: held for held in unpacked(_ranks, body, "snapshot ranks", times=EVENT_TIMES)}


_claim = msgspec.json.Decoder(Claim)
_ranks = msgspec.msgpack.Decoder(list[HeldRank])


class _Bounded(io.BytesIO):
    """An object as it comes: what it says of its own size is no promise."""

    def write(self, data: "Buffer", /) -> int:
        """Take more; raise ValueError beyond :data:`OBJECT_MAX_BYTES`."""
        if self.tell() + memoryview(data).nbytes > OBJECT_MAX_BYTES:
            raise ValueError(f"it is over the {OBJECT_MAX_BYTES} bytes allowed")
        return super().write(data)


PART_KEPT_S = 10.0
"""How long a part stays in memory for the other ranks in it."""

PARTS_READ_MAX = 4
"""Parts that are read at the same time."""

LOADS_MAX = 5
"""A snapshot that is replaced again and again while it is read is given up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a replica may begin with: a snapshot's ranks, and the stream that goes on from it.

    ``sequence`` is where the stream goes on: the snapshot knows everything up to there; 0 without a snapshot.
    """

    snapshot: str
    sequence: int
    ranks: dict[WorkerRank, HeldRank]
    stream: StreamReading

    @property
    def is_reached(self) -> bool:
        """Whether the stream still has everything that follows the snapshot."""
        return self.stream.first <= self.sequence + 1


class StoredIndex:
    """Reads the valid snapshot; what was read is kept until :meth:`forget`."""

    def __init__(self, store: ComponentSnapshots, stream: EventStream) -> None:
        self._store = store
        self._stream = stream
        self._stage: Stage | None = None
        self._loading = asyncio.Lock()
        self._reading = asyncio.Semaphore(PARTS_READ_MAX)
        self._parts: dict[str, asyncio.Task[memoryview]] = {}

    def forget(self, stage: Stage) -> None:
        """Read again next time, if ``stage`` is what was read last: it was replaced."""
        if self._stage is stage:
            self._stage = None

    def close(self) -> None:
        """Read nothing any more."""
        for task in list(self._parts.values()):
            task.cancel()

    async def stage(self) -> Stage:
        """What there is to begin with. A stream that is past the snapshot has a newer one: load again.

        Raises what the client does.
        """
        async with self._loading:
            for _ in range(LOADS_MAX):
                if self._stage is not None:
                    return self._stage
                try:
                    stage = await self._load()
                except NotFoundError:
                    continue  # its objects went while they were read
                if not stage.snapshot or stage.is_reached:
                    self._stage = stage
            raise NotFoundError(description=f"no snapshot could be read in {LOADS_MAX} tries")

    async def _load(self) -> Stage:
        claim = (await self._store.claim()).claim
        reading = await self._stream.read()
        if not claim.snapshot or claim.stream != reading.made:
            return Stage("", 0, {}, reading)  # none, or one of a stream that is no more
        ranks = decode_ranks(await self._store.get(ranks_name(claim.snapshot)))
        # Read the stream after the snapshot: one that is past it by then shows.
        return Stage(claim.snapshot, claim.sequence, ranks, await self._stream.read())

    async def snapshot(self, stage: Stage, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """The rank in the snapshot; None when it is not in it, or from another start of its worker.

        Raises NotFoundError when the snapshot was replaced, and what the client does.
        """
        held = stage.ranks.get(rank)
        if held is None or held.epoch != epoch:
            return None
        part = await self._part(part_name(stage.snapshot, held.part))
        snapshot = decode_snapshot(part[held.start : held.start + held.size])
        if snapshot is None or (snapshot.rank, snapshot.epoch) != (rank, epoch):
            raise ProtocolError(
                f"snapshot {stage.snapshot}: not rank {rank} where it should be", param="part"
            )
        return snapshot

    async def _part(self, name: str) -> memoryview:
        task = self._parts.get(name)
        if task is None:
            task = self._parts[name] = asyncio.get_running_loop().create_task(self._read(name))
            task.add_done_callback(lambda task: self._read_part(name, task))
        return await asyncio.shield(task)

    def _read_part(self, name: str, task: "asyncio.Task[memoryview]") -> None:
        """Keep a part for a while; one that could not be read is read again by the next caller."""
        if task.cancelled() or task.exception() is not None:
            self._parts.pop(name, None)
        else:
            asyncio.get_running_loop().call_later(PART_KEPT_S, self._parts.pop, name, None)

    async def _read(self, name: str) -> memoryview:
        async with self._reading:
            return await self._store.get(name)
