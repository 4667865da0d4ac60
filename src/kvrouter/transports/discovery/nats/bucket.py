"""Records in a key-value bucket of JetStream, each signed and numbered.

A card's number is the revision that it was written over, or where nothing was the bucket's last one: it grows
from each record of a key to the next, no matter which process writes them. A record that is written again is
old.

The server repeats every card that it stored on a plain subject. A watcher listens there and so needs no
consumer in the server, which could die without a word; what it misses, the next renewal repeats.
"""

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, NamedTuple, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
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
from kvrouter.transports.discovery.card_tracker import RENEWALS_PER_LEASE, StoreRefusals, TroubleSink
from kvrouter.transports.discovery.leased_watch import LeasedWatch
from kvrouter.transports.discovery.records import ChangeFeed, OtherWrote, PolledFeed, Record, RecordKind
from kvrouter.transports.discovery.wire import CardRecord, checked_namespace
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth
from kvrouter.transports.nats_client import reason

HEARD_WITHIN_S = 2.5
"""A server that its leader has not heard for so long counts as gone; they report every second."""

_NS_PER_S = 1e9


def check_majority(name: str, cluster: ClusterInfo | None) -> None:
    """Raise ConnectionError when most of the servers that keep ``name`` are away.

    Those that are left answer what they knew, for some time under their old leader, and take no writes: a
    lease that nobody could renew has not run out.
    """
    if cluster is None or not cluster.replicas:
        return
    if not cluster.leader:
        raise ConnectionError(f"most of the NATS servers that keep {name} are away: they have no leader")
    heard = [0 < (peer.active or 0) < HEARD_WITHIN_S * _NS_PER_S for peer in cluster.replicas]
    n_servers = 1 + len(heard)
    n_there = 1 + sum(heard)
    if 2 * n_there <= n_servers:
        raise ConnectionError(
            f"most of the NATS servers that keep {name} are away: {n_there} of {n_servers} are there"
        )


UNREAD_MAX_MESSAGES = 65_536
UNREAD_MAX_BYTES = 64 * 1024 * 1024
"""How much may wait to be read; what comes then is dropped, and comes again with the next renewal."""

READS_AT_ONCE = 128
"""How many keys are asked for at a time."""

STORE_ERRORS = (NatsError, TimeoutError, OSError)
"""What asking NATS raises when it does not do what was asked."""

KeptSink = Callable[[str, bytes | None, int], None]
"""(key, value or None where it was deleted, revision)."""

CHECK_KEY = "check"
CHECK_BYTES = 2048
"""A test write in place of that of a card, and where it goes: no worker has that id."""

TICKS_PER_LEASE = 20
TICK_MAX_S = 0.5
"""How soon this end notices that the connection is there again."""

QUIET_LEASES = 0.5
"""For how much of a lease a watcher believes in a store from which it hears nothing."""

REMEMBERED_LEASES = 10
"""For how many leases a worker that is over is remembered. Its key is gone after one."""

_EXISTS = 10058
"""The server's code for a stream of that name which is configured differently."""

_OTHER_REVISION = frozenset({10071, 10164})
"""The server's codes for a key that is at another revision than was named."""

T = TypeVar("T")


class Kept(NamedTuple):
    """What a bucket keeps under a key: no value where it was deleted, revision 0 where nothing ever was."""

    value: bytes | None
    revision: int


class BucketRecords(Generic[T]):
    """Keeps the records of ``kind`` in a bucket of ``namespace``, which is made with the first one. A version
    is the revision of a key.

    Records are sealed with ``token`` for their keys and ``purpose``. With a lease of ``lease_s`` seconds they
    end with it, are numbered, and are repeated on a subject. ``replicas`` is how many servers keep the
    bucket. ``on_refused`` hears of keys that hold no record, once however many watch.
    """

    unit = "key"
    errors: tuple[type[Exception], ...] = (*STORE_ERRORS, ProtocolError)

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
        self._seal = MessageAuth(token, f"{purpose} 1 {namespace}")
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
        """What ``error`` says, in a line that a person can act on."""
        return reason(error)

    async def list_all(self) -> list[Record[T, int]]:
        """Return every record; nothing where there is no bucket. Where they have no lease, the server is
        asked for its last write, and for more where that is new.
        """
        self.check_connected()
        try:
            info = await self._js.stream_info(f"KV_{self.name}", subjects_filter=">")
            check_majority(self.name, info.cluster)
            listed_at = info.created, info.state.last_seq
            if listed_at == self._listed_at:
                return self._listed
            found = []
            async for key, kept in self.read_all(sorted(self._keys_in(info))):
                if kept.value is not None and (record := self._record(key, kept.value, kept.revision)):
                    found.append(record)
        except NotFoundError:
            self._listed_at = None
            return []
        self._listed = found[: self._kind.records_max]
        self._listed_at = None if self.lease_s else listed_at
        return self._listed

    def changes(self: "BucketRecords[CardRecord]", watch: LeasedWatch[int]) -> ChangeFeed:
        """Return what listens for ``watch``."""
        return BucketFeed(self, watch)

    async def read(self, key: str) -> tuple[T | None, int | None]:
        """Return what is there, and its revision."""
        self.check_connected()
        kept = await self._read(key)
        try:
            return None if kept.value is None else self.opened(key, kept.value)[1], kept.revision or None
        except ProtocolError:
            return None, kept.revision

    async def put(self, value: T) -> None:
        """Write a record, over whatever is there."""
        self.check_connected()
        key, bucket = self._kind.key_of(value), await self._made()
        number = await self._last_revision(bucket) if self.lease_s else 0
        await bucket.put(key, self._seal.seal(key, self._kind.encode(value), number=number))

    async def put_over(self, value: T, over: int | None) -> int:
        """Write over a revision; return the new one. Raises OtherWrote when another one is there."""
        self.check_connected()
        bucket = await self._bound()
        try:
            return await self._update(bucket, value, over or 0)
        except (NoStreamResponseError, NotFoundError):
            await self.identify()
            return await self._update(bucket, value, 0)

    async def delete(self, key: str, version: int | None = None) -> None:
        """Delete what is there; idempotent. Raises OtherWrote where it is at another revision."""
        self.check_connected()
        try:
            await (await self._js.key_value(self.name)).delete(key, last=version)
        except NotFoundError:
            return
        except APIError as error:
            if error.err_code in _OTHER_REVISION:
                raise OtherWrote(f"key {key} is not at {version}") from error
            raise

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return after a part of the lease, soon where it failed, and soon after the connection was lost."""
        due_at = time.monotonic() + (self.tick_s if failures else lease_s / RENEWALS_PER_LEASE)
        while True:
            await asyncio.sleep(self.tick_s)
            reconnects = self.client.stats["reconnects"]
            if time.monotonic() >= due_at or reconnects != self._renewed_after:
                self._renewed_after = reconnects
                return

    async def close(self) -> None:
        """The connection stays its maker's, who closes it."""

    # For who listens

    def check_connected(self) -> None:
        """Raise ConnectionError, which is among STORE_ERRORS, while there is no connection."""
        if not self.client.is_connected:
            raise ConnectionError("not connected to NATS")

    async def identify(self) -> datetime.datetime:
        """Make the bucket where it is missing. Returns when it was made: one that was lost is another.

        Raises ConnectionError, which is among STORE_ERRORS, while most of the servers that keep it are away,
        and ProtocolError for a bucket that is none of ours.
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
        """Return when the store takes a write as long as a card. Raises ConnectionError, which is among
        STORE_ERRORS, for one that answers and takes none: its disk is full, or was.

        What is written says of a key that is nobody's that it was deleted, which is no news to any watcher.
        """
        subject = f"$KV.{self.name}.{CHECK_KEY}"
        try:
            await self._js.publish(subject, bytes(CHECK_BYTES), headers={KV_OP: "DEL"})
        except STORE_ERRORS as error:
            raise ConnectionError(
                f"NATS answers and takes no writes ({reason(error)}): when its disk has room, restart it"
            ) from error

    async def listen(self, on_kept: KeptSink) -> Subscription:
        """Hear of every key that is written from now on."""

        async def on_message(message: Msg) -> None:
            headers = message.headers or {}
            revision = headers.get("Nats-Sequence", "")
            is_deleted = KV_OP in headers or KV_MARKER_REASON in headers
            on_kept(
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
        """Return the number and the record of what is kept under ``key``; raise ProtocolError."""
        number, body = self._seal.numbered(key, value)
        return number, self._kind.checked(key, bytes(body))

    async def keys(self) -> list[str]:
        """Every key."""
        return self._keys_in(await self._js.stream_info(f"KV_{self.name}", subjects_filter=">"))

    async def read_all(self, keys: list[str]) -> AsyncIterator[tuple[str, Kept]]:
        """Yield what is kept under each of these keys."""
        for first in range(0, len(keys), READS_AT_ONCE):
            some = keys[first : first + READS_AT_ONCE]
            for each in zip(some, await asyncio.gather(*map(self._read, some)), strict=True):
                yield each

    def refuse(self, key: str, error: ProtocolError, *, revision: int) -> None:
        """Report that ``key`` holds no record."""
        self.refusals.tell(key, f"key {key[:80]} of bucket {self.name}", error.message, version=revision)

    def _record(self, key: str, value: bytes, revision: int) -> Record[T, int] | None:
        """Return what is kept under ``key``; None for what is no record, which is reported."""
        try:
            _, record = self.opened(key, value)
        except ProtocolError as error:
            self.refuse(key, error, revision=revision)
            return None
        self.refusals.forget(key, version=revision)
        return Record(key, record, revision)

    def _keys_in(self, info: StreamInfo) -> list[str]:
        """The keys of which the bucket has anything: of those that were removed, a mark."""
        return [subject.removeprefix(f"$KV.{self.name}.") for subject in info.state.subjects or {}]

    async def _read(self, key: str) -> Kept:
        try:
            entry = await (await self._bound()).get(key)
        except KeyNotFoundError as error:
            return Kept(None, 0 if error.entry is None else error.entry.revision or 0)
        return Kept(entry.value or b"", entry.revision or 0)

    async def _update(self, bucket: KeyValue, value: T, revision: int) -> int:
        key = self._kind.key_of(value)
        number = revision or await self._last_revision(bucket)
        try:
            return await bucket.update(
                key, self._seal.seal(key, self._kind.encode(value), number=number), last=revision
            )
        except KeyWrongLastSequenceError as error:
            raise OtherWrote(f"key {key} is not at {revision}") from error

    async def _last_revision(self, bucket: KeyValue) -> int:
        """The last one of any key, those included that are gone."""
        return (await bucket.status()).stream_info.state.last_seq

    async def _made(self) -> KeyValue:
        try:
            return await self._js.key_value(self.name)
        except BucketNotFoundError:
            try:
                return await self._js.create_key_value(self._config)
            except APIError as error:
                if error.err_code != _EXISTS:
                    raise
                return await self._js.key_value(self.name)

    async def _bound(self) -> KeyValue:
        if self._kv is None:
            await self.identify()
        if self._kv is None:
            raise ConnectionError(f"no bucket {self.name}")
        return self._kv


class BucketFeed(PolledFeed):
    """Hears of writes as they happen; checks the leases now and then.

    When a lease has run out, or nothing was heard for a part of one, the store is asked. One that does not
    answer, or takes no writes while a lease has run out, is lost; one that comes back, or is another than
    before, gives every lease its whole length.
    """

    name = "discovery: watch a bucket"

    def __init__(self, store: BucketRecords[CardRecord], watch: LeasedWatch[int]) -> None:
        self._store = store
        self._watch = watch
        self._made_at: datetime.datetime | None = None
        self._numbers: dict[str, int] = {}
        self._numbers_max = 64
        self._reconnects: int | None = None
        self._heard_at = 0.0
        self._is_lost = False
        self._listening: Subscription | None = None

    def pause_s(self) -> float:
        """Several times in a lease."""
        return self._store.tick_s

    async def hear_no_more(self) -> None:
        """Listen no more; idempotent."""
        if self._listening is None:
            return
        try:
            await self._listening.unsubscribe()
        except STORE_ERRORS:
            # A connection that is closed has unsubscribed already.
            self._listening = None

    async def ask(self) -> None:
        """Check the leases, and ask the store where they alone do not decide."""
        now = time.monotonic()
        self._watch.look(now)
        try:
            await self._ask(now)
        except self._store.errors as error:
            self._is_lost = True
            self._watch.lose(self._store.reason(error))
        self._watch.drop_before(now - REMEMBERED_LEASES * self._store.lease_s)
        if len(self._numbers) > self._numbers_max:
            self._numbers = {key: number for key, number in self._numbers.items() if key in self._watch}
            self._numbers_max = 2 * len(self._numbers) + 64

    async def _ask(self, now: float) -> None:
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
        if not overdue and now - self._heard_at <= QUIET_LEASES * store.lease_s:
            return
        await self._read(overdue)
        made_at = await store.identify()
        if made_at != self._made_at:
            await self._restart(made_at)
            return
        if watch.overdue(now):
            await store.check_writes()  # else nobody could have renewed
        self._heard_at = time.monotonic()
        watch.settle(now)

    async def _restart(self, made_at: datetime.datetime) -> None:
        """Read everything, and give every lease its whole length."""
        if made_at != self._made_at:
            self._numbers.clear()
            self._made_at = made_at
        self._is_lost = False
        self._watch.regain()
        if self._listening is None:
            self._listening = await self._store.listen(self._take)
        await self._read(await self._store.keys())
        self._heard_at = time.monotonic()

    async def _read(self, keys: list[str]) -> None:
        async for key, kept in self._store.read_all(keys):
            if kept.revision:
                self._take(key, kept.value, kept.revision)

    def _take(self, key: str, value: bytes | None, revision: int) -> None:
        """Take what was written; what is older than what is known is no news.

        A key that was deleted is none either: anybody can delete. Its worker's next renewal writes it again,
        or its lease runs out.
        """
        if value is None:
            return
        try:
            self._take_checked(key, value, revision)
        except ProtocolError as error:
            self._store.refuse(key, error, revision=revision)

    def _take_checked(self, key: str, value: bytes, revision: int) -> None:
        number, record = self._store.opened(key, value)
        self._heard_at = time.monotonic()
        if key not in self._watch:
            self._numbers.pop(key, None)
        known = self._numbers.get(key, -1)
        if number <= known:
            if number < known:
                # Late, or said again, or from a bucket that was made again: the next check asks which it is.
                self._heard_at = 0.0
            return
        self._watch.take(Record(key, record, number))
        self._numbers[key] = number
        self._store.refusals.forget(key, version=revision)
