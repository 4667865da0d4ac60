"""The snapshots of one component: a key that names the valid snapshot, and objects.

Only the key changes hands: it is written by compare-and-set, and names the valid snapshot and the replica
that takes the next one. A slow replica that lost the key notices at its next write; its snapshot never
counts.

The key and every object are sealed for their names; the name of an object is never reused. A key with a wrong
MAC is treated as missing, and overwritten.
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
from kvrouter.transports.events.encoding import EVENT_TIMES, decode_snapshot
from kvrouter.transports.events.jetstream.stream import ComponentNames, EventStream, StreamReading
from kvrouter.transports.message_auth import MessageAuth

if TYPE_CHECKING:
    from typing_extensions import Buffer


KEY = "latest"

OBJECT_MAX_BYTES = 1 << 30
"""The longest object that is read: a part holds a few ranks, and ten million blocks take a quarter of it."""

OBJECT_TIMEOUT_S = 10.0
"""The longest time to read or write one object."""


class Claim(msgspec.Struct, frozen=True):
    """The value of the key: the valid snapshot, what it covers, and the replica that takes the next one.

    ``snapshot`` is "" without one; it covers ``stream`` up to ``sequence``. ``holder`` "": no replica.
    """

    snapshot: str = ""
    stream: str = ""
    sequence: int = 0
    holder: str = ""


class StoredRank(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a snapshot: its epoch, its next event id, and its blocks: ``size`` bytes of a part."""

    rank: WorkerRank
    epoch: Epoch
    next_event_id: EventId
    part: int
    start: int
    size: int


class RevisedClaim(NamedTuple):
    """A claim and the key's revision; 0 without a key."""

    claim: Claim
    revision: int


class ClaimLost(Exception):
    """The claim was lost: another replica wrote the key first."""


class ComponentSnapshots:
    """The key and the objects of one component. Methods raise what the client raises, in bounded time.

    ``on_refused`` is called for a key with a wrong MAC.
    """

    def __init__(
        self,
        jetstream: JetStreamContext,
        names: ComponentNames,
        *,
        auth: MessageAuth,
        on_refused: Callable[[str], None],
        replicas: int,
    ) -> None:
        self._jetstream = jetstream
        self._names = names
        self._auth = auth
        self._on_refused = on_refused
        self._replicas = replicas
        self._keys: KeyValue | None = None
        self._objects: ObjectStore | None = None

    # The key

    async def claim(self) -> RevisedClaim:
        """Return the current claim; an empty one for a key with a wrong MAC."""
        keys = await self._open_keys()
        try:
            entry = await keys.get(KEY)
        except KeyNotFoundError as error:
            deleted = error.entry
            return RevisedClaim(Claim(), 0 if deleted is None else deleted.revision or 0)
        revision = entry.revision or 0
        try:
            body = self._auth.opened(self._auth_subject(KEY), entry.value or b"")
            return RevisedClaim(decoded(_claim, body, "claim"), revision)
        except ProtocolError as error:
            self._on_refused(f"snapshot key of {self._names.component}: {error.message}")
            return RevisedClaim(Claim(), revision)

    async def write(self, claim: Claim, *, over: int) -> int:
        """Replace the key's revision ``over``; return the new one. Raises :class:`ClaimLost`."""
        keys = await self._open_keys()
        value = self._auth.seal(self._auth_subject(KEY), msgspec.json.encode(claim))
        try:
            return await keys.update(KEY, value, last=over)
        except KeyWrongLastSequenceError as error:
            raise ClaimLost(f"the key is no more at revision {over}") from error

    # The objects

    async def put(self, name: str, body: bytes) -> None:
        """Store an object."""
        objects = await self._open_objects()
        async with asyncio.timeout(OBJECT_TIMEOUT_S):
            # In a thread: the MAC of a large object takes long.
            await objects.put(name, await asyncio.to_thread(self._auth.seal, self._auth_subject(name), body))

    async def get(self, name: str) -> memoryview:
        """Read an object; raise NotFoundError when it is gone, ProtocolError for a wrong MAC."""
        objects = await self._open_objects()
        body = _BoundedBuffer()
        async with asyncio.timeout(OBJECT_TIMEOUT_S):
            try:
                await objects.get(name, writeinto=body)
            except (AttributeError, TypeError, ValueError) as error:
                # The client does not check an object's metadata, which any peer may have written.
                raise ProtocolError(
                    f"object {name}: what is written about it: {error}", param="object"
                ) from error
            return await asyncio.to_thread(self._auth.opened, self._auth_subject(name), body.getbuffer())

    async def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""
        objects = await self._open_objects()
        for name in names:
            with suppress(ObjectNotFoundError):
                await objects.delete(name)
            # Remove the metadata too, because names are never reused.
            token = base64.urlsafe_b64encode(name.encode()).decode()
            await self._jetstream.purge_stream(f"OBJ_{self._names.bucket}", subject=self._meta_subject(token))

    async def objects(self) -> list[str]:
        """Return the names of all objects; undecodable names are left out."""
        await self._open_objects()
        prefix = self._meta_subject("")
        info = await self._jetstream.stream_info(f"OBJ_{self._names.bucket}", subjects_filter=f"{prefix}>")
        names = []
        for subject in info.state.subjects or ():
            with suppress(ValueError):
                names.append(base64.urlsafe_b64decode(subject.removeprefix(prefix)).decode())
        return names

    def _auth_subject(self, name: str) -> str:
        """Return the subject for which the key or an object is sealed."""
        return f"{self._names.bucket} {name}"

    def _meta_subject(self, token: str) -> str:
        """Return the subject of an object's metadata."""
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
    """Return the name of the object of a snapshot's part."""
    return f"{snapshot}/part-{number}"


def ranks_name(snapshot: str) -> str:
    """Return the name of the object that lists a snapshot's ranks."""
    return f"{snapshot}/ranks"


def is_of(snapshot: str, name: str) -> bool:
    """Whether the object ``name`` belongs to ``snapshot``."""
    return name.startswith(f"{snapshot}/")


def encode_ranks(ranks: Sequence[StoredRank]) -> bytes:
    """Return the list of a snapshot's ranks as msgpack."""
    return msgspec.msgpack.encode(ranks)


def decode_ranks(body: memoryview) -> dict[WorkerRank, StoredRank]:
    """Return a snapshot's ranks; raise ProtocolError."""
    return {stored.rank: stored for stored in unpacked(_ranks, body, "snapshot ranks", times=EVENT_TIMES)}


_claim = msgspec.json.Decoder(Claim)
_ranks = msgspec.msgpack.Decoder(list[StoredRank])


class _BoundedBuffer(io.BytesIO):
    """A buffer with a limit: the size in an object's metadata cannot be trusted."""

    def write(self, data: "Buffer", /) -> int:
        """Append; raise ValueError beyond :data:`OBJECT_MAX_BYTES`."""
        if self.tell() + memoryview(data).nbytes > OBJECT_MAX_BYTES:
            raise ValueError(f"it is over the {OBJECT_MAX_BYTES} bytes allowed")
        return super().write(data)


PART_KEPT_S = 10.0
"""How long a part is cached for its other ranks."""

PARTS_READ_MAX = 4
"""Parts that are read concurrently."""

LOADS_MAX = 5
"""Attempts to load a snapshot that is replaced while it is read."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The starting point of a replica: a snapshot's ranks, and the stream that continues from it.

    The snapshot covers the stream up to ``sequence``; 0 without a snapshot.
    """

    snapshot: str
    sequence: int
    ranks: dict[WorkerRank, StoredRank]
    stream: StreamReading

    @property
    def is_reached(self) -> bool:
        """Whether the stream still has every message after the snapshot."""
        return self.stream.first <= self.sequence + 1


class StoredIndex:
    """Reads the valid snapshot, and caches it until :meth:`forget`."""

    def __init__(self, store: ComponentSnapshots, stream: EventStream) -> None:
        self._store = store
        self._stream = stream
        self._baseline: Baseline | None = None
        self._loading = asyncio.Lock()
        self._reading = asyncio.Semaphore(PARTS_READ_MAX)
        self._parts: dict[str, asyncio.Task[memoryview]] = {}

    def forget(self, baseline: Baseline) -> None:
        """Read again next time, if ``baseline`` is the cached one: it was replaced."""
        if self._baseline is baseline:
            self._baseline = None

    def close(self) -> None:
        """Cancel all reads."""
        for task in list(self._parts.values()):
            task.cancel()

    async def baseline(self) -> Baseline:
        """Return the starting point. If the stream was purged past the snapshot, a newer one is loaded.

        Raises what the client raises.
        """
        async with self._loading:
            for _ in range(LOADS_MAX):
                if self._baseline is not None:
                    return self._baseline
                try:
                    baseline = await self._load()
                except NotFoundError:
                    continue  # its objects were removed meanwhile
                if not baseline.snapshot or baseline.is_reached:
                    self._baseline = baseline
            raise NotFoundError(description=f"no snapshot could be read in {LOADS_MAX} tries")

    async def _load(self) -> Baseline:
        claim = (await self._store.claim()).claim
        reading = await self._stream.read()
        if not claim.snapshot or claim.stream != reading.created:
            return Baseline("", 0, {}, reading)  # no snapshot, or one of an earlier stream
        ranks = decode_ranks(await self._store.get(ranks_name(claim.snapshot)))
        # Read the stream after the snapshot, to notice that it was purged past the snapshot meanwhile.
        return Baseline(claim.snapshot, claim.sequence, ranks, await self._stream.read())

    async def snapshot(self, baseline: Baseline, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """Return the rank's snapshot of ``epoch``; None if there is none.

        Raises NotFoundError if it was replaced, ProtocolError if invalid, and the client's errors.
        """
        stored = baseline.ranks.get(rank)
        if stored is None or stored.epoch != epoch:
            return None
        part = await self._part(part_name(baseline.snapshot, stored.part))
        snapshot = decode_snapshot(part[stored.start : stored.start + stored.size])
        if snapshot is None or (snapshot.rank, snapshot.epoch) != (rank, epoch):
            raise ProtocolError(
                f"snapshot {baseline.snapshot}: not rank {rank} where it should be", param="part"
            )
        return snapshot

    async def _part(self, name: str) -> memoryview:
        task = self._parts.get(name)
        if task is None:
            task = self._parts[name] = asyncio.get_running_loop().create_task(self._read(name))
            task.add_done_callback(lambda task: self._read_part(name, task))
        return await asyncio.shield(task)

    def _read_part(self, name: str, task: "asyncio.Task[memoryview]") -> None:
        """Cache a part for a while; a failed read is repeated by the next caller."""
        if task.cancelled() or task.exception() is not None:
            self._parts.pop(name, None)
        else:
            asyncio.get_running_loop().call_later(PART_KEPT_S, self._parts.pop, name, None)

    async def _read(self, name: str) -> memoryview:
        async with self._reading:
            return await self._store.get(name)
