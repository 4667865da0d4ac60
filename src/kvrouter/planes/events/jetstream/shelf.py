"""Where one component's snapshots lie: a key that names the valid one, and the objects that it is made of.

The key is the one place where anything changes hands: it is only ever written by compare-and-set, and it
names both the valid snapshot and the replica that takes the next one. Whoever lost the key to another
replica, by being too slow, finds out at its next write, and its snapshot never becomes valid.
"""

import asyncio
import base64
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from nats.js import JetStreamContext, api
from nats.js.errors import (
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    ObjectNotFoundError,
)
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, EventId, WorkerRank
from kvrouter.planes.events.jetstream.words import LaneNames

KEY = "latest"

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


class SnapshotShelf:
    """The key and the objects of one component. Methods raise what the client does, in bounded time."""

    def __init__(self, jetstream: JetStreamContext, names: LaneNames, *, replicas: int) -> None:
        self._jetstream = jetstream
        self._names = names
        self._replicas = replicas
        self._keys: KeyValue | None = None
        self._objects: ObjectStore | None = None

    # The key

    async def claim(self) -> Revised:
        """The key as it is now; raise ProtocolError for one that is not ours."""
        keys = await self._open_keys()
        try:
            entry = await keys.get(KEY)
        except KeyNotFoundError as error:
            deleted = error.entry
            return Revised(Claim(), 0 if deleted is None else deleted.revision or 0)
        try:
            claim = msgspec.json.decode(entry.value or b"", type=Claim)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"snapshot key: {error}", param="snapshot key") from error
        return Revised(claim, entry.revision or 0)

    async def write(self, claim: Claim, *, over: int) -> int:
        """Write the key over its revision ``over``; return the new one. Raises :class:`Overtaken`."""
        keys = await self._open_keys()
        try:
            return await keys.update(KEY, msgspec.json.encode(claim), last=over)
        except KeyWrongLastSequenceError as error:
            raise Overtaken(f"the key is no more at revision {over}") from error

    # The objects

    async def put(self, name: str, body: bytes) -> None:
        """Store an object."""
        objects = await self._open_objects()
        async with asyncio.timeout(OBJECT_TIMEOUT_S):
            await objects.put(name, body)

    async def get(self, name: str) -> memoryview:
        """Read an object; raise NotFoundError when it is gone."""
        objects = await self._open_objects()
        body = io.BytesIO()
        async with asyncio.timeout(OBJECT_TIMEOUT_S):
            await objects.get(name, writeinto=body)
        return body.getbuffer()

    async def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone are no mistake."""
        objects = await self._open_objects()
        for name in names:
            with suppress(ObjectNotFoundError):
                await objects.delete(name)
            # What tells that there was an object goes too: names are never used again.
            token = base64.urlsafe_b64encode(name.encode()).decode()
            await self._jetstream.purge_stream(f"OBJ_{self._names.bucket}", subject=self._meta_subject(token))

    async def objects(self) -> list[str]:
        """The names of all objects."""
        await self._open_objects()
        prefix = self._meta_subject("")
        info = await self._jetstream.stream_info(f"OBJ_{self._names.bucket}", subjects_filter=f"{prefix}>")
        tokens = [subject.removeprefix(prefix) for subject in info.state.subjects or ()]
        return [base64.urlsafe_b64decode(token).decode() for token in tokens]

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
    try:
        ranks = msgspec.msgpack.decode(body, type=list[HeldRank])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"snapshot ranks: {error}", param="snapshot ranks") from error
    return {held.rank: held for held in ranks}
