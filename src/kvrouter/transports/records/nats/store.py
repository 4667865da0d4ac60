"""Records in a key-value bucket of JetStream, each sealed and numbered.

A card's number is the revision that it replaces, or the bucket's last revision for a new key: it grows with
each record of a key, whichever process writes it, so a replayed record has an old number.

The server republishes every stored card on a plain subject. A watcher subscribes there and so needs no
consumer on the server, which could fail silently; the next renewal repeats a missed message.
"""

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, NamedTuple, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import ClusterInfo, KeyValueConfig, RePublish, StreamInfo
from nats.js.errors import (
    APIError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
    NotFoundError,
)
from nats.js.kv import KV_MARKER_REASON, KV_OP, KeyValue

from kvrouter.core.errors import ProtocolError
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth
from kvrouter.transports.nats_client import CLIENT_ERRORS, STREAM_EXISTS, reason
from kvrouter.transports.records.card_tracker import RENEWALS_PER_LEASE, StoreRefusals, TroubleSink
from kvrouter.transports.records.encoding import CardRecord, checked_namespace
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.store import ChangeFeed, PolledFeed, Record, RecordKind, VersionConflict

PEER_ACTIVE_WITHIN_S = 2.5
"""A replica that its leader has not heard from for this long counts as gone; replicas report every second."""

_NS_PER_S = 1e9


def check_majority(name: str, cluster: ClusterInfo | None) -> None:
    """Raise ConnectionError when most of the servers that store ``name`` are unreachable.

    The remaining servers answer with old data, for some time under their old leader, and take no writes: a
    lease that could not be renewed has not run out.
    """
    if cluster is None or not cluster.replicas:
        return
    if not cluster.leader:
        raise ConnectionError(f"most of the NATS servers that keep {name} are away: they have no leader")
    active = [0 < (peer.active or 0) < PEER_ACTIVE_WITHIN_S * _NS_PER_S for peer in cluster.replicas]
    n_servers = 1 + len(active)
    n_there = 1 + sum(active)
    if 2 * n_there <= n_servers:
        raise ConnectionError(
            f"most of the NATS servers that keep {name} are away: {n_there} of {n_servers} are there"
        )


UNREAD_MAX_MESSAGES = 65_536
UNREAD_MAX_BYTES = 64 * 1024 * 1024
"""Limits of unread messages; further ones are dropped, and the next renewal repeats them."""

READS_AT_ONCE = 128
"""How many keys are read concurrently."""

EntrySink = Callable[[str, bytes | None, int], None]
"""(key, value or None where it was deleted, revision)."""

CHECK_KEY = "check"
CHECK_BYTES = 2048
"""The key and size of a test write that stands for a card: no worker has that id."""

TICKS_PER_LEASE = 20
TICK_MAX_S = 0.5
"""The longest time until a reconnect is noticed."""

QUIET_LEASES = 0.5
"""The part of a lease after which a silent store is read again."""

REMEMBERED_LEASES = 10
"""For how many leases a gone worker is remembered. Its key expires after one."""

_OTHER_REVISION = frozenset({10071, 10164})
"""The server's codes for a key that is at another revision."""

T = TypeVar("T")


class BucketEntry(NamedTuple):
    """The entry of a key: value None where it was deleted, revision 0 where it never existed."""

    value: bytes | None
    revision: int


class BucketRecords(Generic[T]):
    """Keeps the records of ``kind`` in a bucket of ``namespace``, created with the first record. A version is
    the revision of a key.

    Records are sealed with ``token`` for their keys and ``purpose``. With a lease of ``lease_s`` seconds they
    expire, are numbered, and are republished on a subject. ``replicas`` is the number of servers that store
    the bucket. ``on_refused`` is called for keys that hold no record, once for all watches.
    """

    unit = "key"
    errors: tuple[type[Exception], ...] = (*CLIENT_ERRORS, ProtocolError)

    def __init__(
        self,
        client: Client,
        kind: RecordKind[T],
        *,
        namespace: str,
        purpose: str,
        token: str,
        replicas: int,
        answer_s: float,
        on_refused: TroubleSink,
        lease_s: float | None = None,
    ) -> None:
        self.client = client
        self.name = f"kvrouter-{checked_namespace(namespace)}-{kind.name}s"
        self.live = f"kvrouter.{namespace}.{purpose}.card"
        self.lease_s = lease_s or 0.0
        self.tick_s = min(self.lease_s / TICKS_PER_LEASE, TICK_MAX_S)
        self.refusals = StoreRefusals(on_refused)
        self._kind = kind
        self._auth = MessageAuth(token, f"{purpose} 1 {namespace}")
        self._js = client.jetstream(timeout=answer_s)
        self._config = KeyValueConfig(
            bucket=self.name,
            description=f"kvrouter: the {kind.name}s of a namespace",
            ttl=lease_s,
            replicas=replicas,
            max_value_size=MESSAGE_AUTH_BYTES + kind.bytes_max,
            republish=RePublish(src=f"$KV.{self.name}.>", dest=f"{self.live}.>") if lease_s else None,
        )
        self._kv: KeyValue | None = None
        self._listed_at: tuple[object, int] | None = None
        self._listed: list[Record[T, int]] = []
        self._renewed_after = client.stats["reconnects"]

    def reason(self, error: Exception) -> str:
        """Return ``error`` as one line that a person can act on."""
        return reason(error)

    async def list_all(self) -> list[Record[T, int]]:
        """Return every record; an empty list without a bucket. Records without a lease are read again only
        after the bucket's last revision changed.
        """
        self.check_connected()
        try:
            info = await self._js.stream_info(f"KV_{self.name}", subjects_filter=">")
            check_majority(self.name, info.cluster)
            listed_at = info.created, info.state.last_seq
            if listed_at == self._listed_at:
                return self._listed
            found = []
            async for key, entry in self.read_all(sorted(self._keys_in(info))):
                if entry.value is not None and (record := self._record(key, entry.value, entry.revision)):
                    found.append(record)
        except NotFoundError:
            self._listed_at = None
            return []
        self._listed = found[: self._kind.records_max]
        self._listed_at = None if self.lease_s else listed_at
        return self._listed

    def changes(self: "BucketRecords[CardRecord]", watch: LeasedWatch[int]) -> ChangeFeed:
        """Return a feed that subscribes to the bucket for ``watch``."""
        return BucketFeed(self, watch)

    async def read(self, key: str) -> tuple[T | None, int | None]:
        """Return the record and its revision; (None, its revision) for an entry that is no record."""
        self.check_connected()
        entry = await self._read(key)
        try:
            return None if entry.value is None else self.opened(key, entry.value)[1], entry.revision or None
        except ProtocolError:
            return None, entry.revision

    async def put(self, value: T) -> None:
        """Write a record, regardless of the current version."""
        self.check_connected()
        key, bucket = self._kind.key_of(value), await self._made()
        number = await self._last_revision(bucket) if self.lease_s else 0
        await bucket.put(key, self._auth.seal(key, self._kind.encode(value), number=number))

    async def put_over(self, value: T, over: int | None) -> int:
        """Replace the revision ``over`` (None: create); return the new one. Raises VersionConflict."""
        self.check_connected()
        bucket = await self._bound()
        try:
            return await self._update(bucket, value, over or 0)
        except (NoStreamResponseError, NotFoundError):
            await self.identify()
            return await self._update(bucket, value, 0)

    async def delete(self, key: str, version: int | None = None) -> None:
        """Delete this version of a key (None: any); idempotent. Raises VersionConflict at another one."""
        self.check_connected()
        try:
            await (await self._js.key_value(self.name)).delete(key, last=version)
        except NotFoundError:
            return
        except APIError as error:
            if error.err_code in _OTHER_REVISION:
                raise VersionConflict(f"key {key} is not at {version}") from error
            raise

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return after a third of the lease; soon after a failure or a reconnect."""
        due_at = time.monotonic() + (self.tick_s if failures else lease_s / RENEWALS_PER_LEASE)
        while True:
            await asyncio.sleep(self.tick_s)
            reconnects = self.client.stats["reconnects"]
            if time.monotonic() >= due_at or reconnects != self._renewed_after:
                self._renewed_after = reconnects
                return

    async def close(self) -> None:
        """Does nothing: the owner of the connection closes it."""

    # Called by the feed

    def check_connected(self) -> None:
        """Raise ConnectionError, one of CLIENT_ERRORS, while there is no connection."""
        if not self.client.is_connected:
            raise ConnectionError("not connected to NATS")

    async def identify(self) -> datetime.datetime:
        """Create the bucket if it is missing. Return its creation time, which identifies the bucket.

        Raises ProtocolError for a bucket of another configuration, and CLIENT_ERRORS: ConnectionError unless
        a majority of its servers is reachable.
        """
        self._kv = await self._made()
        info = (await self._kv.status()).stream_info
        check_majority(self.name, info.cluster)
        repeats = info.config.republish
        if self.lease_s and (repeats is None or repeats.dest != f"{self.live}.>"):
            raise ProtocolError(
                f"the bucket {self.name} was made by something else: it does not repeat on {self.live}",
                param="bucket",
            )
        if info.created is None:
            raise ProtocolError(f"the bucket {self.name} does not say when it was made", param="bucket")
        return info.created

    async def check_writes(self) -> None:
        """Check by a test write that the store takes writes as long as a card. Raises ConnectionError, one of
        CLIENT_ERRORS, when it does not, because its disk is or was full.

        The write deletes a key that no worker has, so watchers ignore it.
        """
        subject = f"$KV.{self.name}.{CHECK_KEY}"
        try:
            await self._js.publish(subject, bytes(CHECK_BYTES), headers={KV_OP: "DEL"})
        except CLIENT_ERRORS as error:
            raise ConnectionError(
                f"NATS answers and takes no writes ({reason(error)}): when its disk has room, restart it"
            ) from error

    async def listen(self, on_entry: EntrySink) -> Subscription:
        """Subscribe to every write from now on."""

        async def on_message(message: Msg) -> None:
            headers = message.headers or {}
            revision = headers.get("Nats-Sequence", "")
            is_deleted = KV_OP in headers or KV_MARKER_REASON in headers
            on_entry(
                message.subject.rpartition(".")[2],
                None if is_deleted else message.data,
                int(revision) if revision.isdecimal() else 0,
            )

        return await self.client.subscribe(
            f"{self.live}.*",
            cb=on_message,
            pending_msgs_limit=UNREAD_MAX_MESSAGES,
            pending_bytes_limit=UNREAD_MAX_BYTES,
        )

    def opened(self, key: str, value: bytes) -> tuple[int, T]:
        """Return the number and the record in the value of ``key``; raise ProtocolError."""
        number, body = self._auth.numbered(key, value)
        return number, self._kind.checked(key, bytes(body))

    async def keys(self) -> list[str]:
        """Return every key."""
        return self._keys_in(await self._js.stream_info(f"KV_{self.name}", subjects_filter=">"))

    async def read_all(self, keys: list[str]) -> AsyncIterator[tuple[str, BucketEntry]]:
        """Yield the entry of each of these keys."""
        for first in range(0, len(keys), READS_AT_ONCE):
            some = keys[first : first + READS_AT_ONCE]
            for each in zip(some, await asyncio.gather(*map(self._read, some)), strict=True):
                yield each

    def refuse(self, key: str, error: ProtocolError, *, revision: int) -> None:
        """Report that ``key`` holds no record."""
        self.refusals.report(key, f"key {key[:80]} of bucket {self.name}", error.message, version=revision)

    def _record(self, key: str, value: bytes, revision: int) -> Record[T, int] | None:
        """Return the record in the value of ``key``; report a value that is no record, and return None."""
        try:
            _, record = self.opened(key, value)
        except ProtocolError as error:
            self.refuse(key, error, revision=revision)
            return None
        self.refusals.forget(key, version=revision)
        return Record(key, record, revision)

    def _keys_in(self, info: StreamInfo) -> list[str]:
        """Return the keys of a bucket, deleted ones included."""
        return [subject.removeprefix(f"$KV.{self.name}.") for subject in info.state.subjects or {}]

    async def _read(self, key: str) -> BucketEntry:
        try:
            entry = await (await self._bound()).get(key)
        except KeyNotFoundError as error:
            return BucketEntry(None, 0 if error.entry is None else error.entry.revision or 0)
        return BucketEntry(entry.value or b"", entry.revision or 0)

    async def _update(self, bucket: KeyValue, value: T, revision: int) -> int:
        key = self._kind.key_of(value)
        number = revision or await self._last_revision(bucket)
        try:
            return await bucket.update(
                key, self._auth.seal(key, self._kind.encode(value), number=number), last=revision
            )
        except KeyWrongLastSequenceError as error:
            raise VersionConflict(f"key {key} is not at {revision}") from error

    async def _last_revision(self, bucket: KeyValue) -> int:
        """Return the bucket's last revision, those of deleted keys included."""
        return (await bucket.status()).stream_info.state.last_seq

    async def _made(self) -> KeyValue:
        try:
            return await self._js.key_value(self.name)
        except BucketNotFoundError:
            try:
                return await self._js.create_key_value(self._config)
            except APIError as error:
                if error.err_code != STREAM_EXISTS:
                    raise
                return await self._js.key_value(self.name)

    async def _bound(self) -> KeyValue:
        if self._kv is None:
            await self.identify()
        if self._kv is None:
            raise ConnectionError(f"no bucket {self.name}")
        return self._kv


class BucketFeed(PolledFeed):
    """Subscribes to the writes of a bucket, and checks leases several times in one.

    When a lease has run out, or no write arrived for a part of one, the store is read. It is lost without an
    answer, or without writes while a lease has run out; once back, or recreated, every lease restarts.
    """

    name = "discovery: watch a bucket"

    def __init__(self, store: BucketRecords[CardRecord], watch: LeasedWatch[int]) -> None:
        self._store = store
        self._watch = watch
        self._made_at: datetime.datetime | None = None
        self._numbers: dict[str, int] = {}
        self._numbers_max = 64
        self._reconnects: int | None = None
        self._received_at = 0.0
        self._is_lost = False
        self._listening: Subscription | None = None

    def pause_s(self) -> float:
        """Return a small part of the lease."""
        return self._store.tick_s

    async def release(self) -> None:
        """Unsubscribe; idempotent."""
        if self._listening is None:
            return
        try:
            await self._listening.unsubscribe()
        except CLIENT_ERRORS:
            # Closing the connection has ended the subscription already.
            self._listening = None

    async def poll(self) -> None:
        """Check the leases, and read the store where they have run out."""
        now = time.monotonic()
        self._watch.check(now)
        try:
            await self._poll(now)
        except self._store.errors as error:
            self._is_lost = True
            self._watch.lose(self._store.reason(error))
        self._watch.drop_before(now - REMEMBERED_LEASES * self._store.lease_s)
        if len(self._numbers) > self._numbers_max:
            self._numbers = {key: number for key, number in self._numbers.items() if key in self._watch}
            self._numbers_max = 2 * len(self._numbers) + 64

    async def _poll(self, now: float) -> None:
        store, watch = self._store, self._watch
        store.check_connected()
        reconnects = store.client.stats["reconnects"]
        if self._is_lost or reconnects != self._reconnects:
            made_at = await store.identify()
            if self._is_lost:
                await store.check_writes()
            await self._restart(made_at)
            self._reconnects = reconnects
            return
        overdue = watch.overdue(now)
        if not overdue and now - self._received_at <= QUIET_LEASES * store.lease_s:
            return
        await self._read(overdue)
        made_at = await store.identify()
        if made_at != self._made_at:
            await self._restart(made_at)
            return
        if watch.overdue(now):
            await store.check_writes()  # else no worker could have renewed
        self._received_at = time.monotonic()
        watch.settle(now)

    async def _restart(self, made_at: datetime.datetime) -> None:
        """Read all keys, and restart every lease."""
        if made_at != self._made_at:
            self._numbers.clear()
            self._made_at = made_at
        self._is_lost = False
        self._watch.regain()
        if self._listening is None:
            self._listening = await self._store.listen(self._take)
        await self._read(await self._store.keys())
        self._received_at = time.monotonic()

    async def _read(self, keys: list[str]) -> None:
        async for key, entry in self._store.read_all(keys):
            if entry.revision:
                self._take(key, entry.value, entry.revision)

    def _take(self, key: str, value: bytes | None, revision: int) -> None:
        """Take a written entry; ignore one that is older than the known one.

        Deletions are ignored too, because any process can delete: the worker's next renewal writes the key
        again, or its lease expires.
        """
        if value is None:
            return
        try:
            self._take_checked(key, value, revision)
        except ProtocolError as error:
            self._store.refuse(key, error, revision=revision)

    def _take_checked(self, key: str, value: bytes, revision: int) -> None:
        number, record = self._store.opened(key, value)
        self._received_at = time.monotonic()
        if key not in self._watch:
            self._numbers.pop(key, None)
        known = self._numbers.get(key, -1)
        if number <= known:
            if number < known:
                # Late, replayed, or from a bucket that was recreated: have the next check read the store.
                self._received_at = 0.0
            return
        self._watch.take(Record(key, record, number))
        self._numbers[key] = number
        self._store.refusals.forget(key, version=revision)
