"""The key-value bucket of one namespace: one key a worker id, its card signed and numbered.

A record's number is the revision that it was written over, or where nothing was the bucket's last one: it
grows from each record of a key to the next, no matter which process writes them. A record that is written
again is old.

The server repeats every record that it stored on a plain subject. A watcher listens there and so needs no
consumer in the server, which could die without a word; what it misses, the next renewal repeats.
"""

import datetime
from collections.abc import Callable
from typing import NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import ClusterInfo, KeyValueConfig, RePublish
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
from kvrouter.transports.discovery.records import OtherWrote
from kvrouter.transports.discovery.wire import RECORD_MAX_BYTES, CardRecord, decode_record, encode_record
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

STORE_ERRORS = (NatsError, TimeoutError, OSError)
"""What asking NATS raises when it does not do what was asked."""

KeptSink = Callable[[str, bytes | None, int], None]
"""(key, value or None where it was deleted, revision)."""

CHECK_KEY = "check"
CHECK_BYTES = 2048
"""A test write in place of that of a card, and where it goes: no worker has that id."""

_EXISTS = 10058
"""The server's code for a stream of that name which is configured differently."""


class Kept(NamedTuple):
    """What a bucket keeps under a key: no value where it was deleted, revision 0 where nothing ever was."""

    value: bytes | None
    revision: int


class Bucket:
    """Reads and writes records. Raises STORE_ERRORS, and ProtocolError for a bucket that is none of ours."""

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        ttl_s: float,
        replicas: int,
        answer_s: float,
    ) -> None:
        self.client = client
        self._seal = MessageAuth(token, f"discovery 1 {namespace}")
        self.name = f"kvrouter-{namespace}-workers"
        self.live = f"kvrouter.{namespace}.discovery.card"
        self._js = client.jetstream(timeout=answer_s)
        self._config = KeyValueConfig(
            bucket=self.name,
            description="kvrouter: the workers of a namespace",
            ttl=ttl_s,
            replicas=replicas,
            max_value_size=MESSAGE_AUTH_BYTES + RECORD_MAX_BYTES,
            republish=RePublish(src=f"$KV.{self.name}.>", dest=f"{self.live}.>"),
        )
        self._kv: KeyValue | None = None

    async def identify(self) -> datetime.datetime:
        """Make the bucket where it is missing. Returns when it was made: one that was lost is another.

        Raises ConnectionError, which is among STORE_ERRORS, while most of the servers that keep it are away.
        """
        try:
            self._kv = await self._js.key_value(self.name)
        except BucketNotFoundError:
            try:
                self._kv = await self._js.create_key_value(self._config)
            except APIError as error:
                if error.err_code != _EXISTS:
                    raise
                self._kv = await self._js.key_value(self.name)
        info = (await self._kv.status()).stream_info
        check_majority(self.name, info.cluster)
        repeats = info.config.republish
        if repeats is None or repeats.dest != f"{self.live}.>":
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

    def opened(self, key: str, value: bytes) -> tuple[int, CardRecord]:
        """Return the number and the record of what is kept under ``key``; raise ProtocolError."""
        number, body = self._seal.numbered(key, value)
        return number, decode_record(bytes(body))

    async def keys(self) -> list[str]:
        """Every key."""
        info = await self._js.stream_info(f"KV_{self.name}", subjects_filter=">")
        prefix = f"$KV.{self.name}."
        return [subject.removeprefix(prefix) for subject in info.state.subjects or {}]

    async def read(self, key: str) -> Kept:
        """Return what is kept under a key."""
        try:
            entry = await (await self._bound()).get(key)
        except KeyNotFoundError as error:
            return Kept(None, 0 if error.entry is None else error.entry.revision)
        return Kept(entry.value or b"", entry.revision or 0)

    async def write(self, record: CardRecord, revision: int) -> int:
        """Write over ``revision``, 0 for nothing, and return the new one.

        Raises OtherWrote when another revision is there.
        """
        key = str(record.card.worker_id)
        bucket = await self._bound()
        try:
            return await self._update(bucket, key, record, revision)
        except (NoStreamResponseError, NotFoundError):
            await self.identify()
            return await self._update(bucket, key, record, 0)

    async def _update(self, bucket: KeyValue, key: str, record: CardRecord, revision: int) -> int:
        number = revision or await self._last_revision(bucket)
        try:
            return await bucket.update(
                key, self._seal.seal(key, encode_record(record), number=number), last=revision
            )
        except KeyWrongLastSequenceError as error:
            raise OtherWrote(f"key {key} is not at {revision}") from error

    async def _last_revision(self, bucket: KeyValue) -> int:
        """The last one of any key, those included that are gone."""
        return (await bucket.status()).stream_info.state.last_seq

    async def _bound(self) -> KeyValue:
        if self._kv is None:
            await self.identify()
        if self._kv is None:
            raise ConnectionError(f"no bucket {self.name}")
        return self._kv


class BucketCards:
    """A record's version is the revision of its key, 0 where nothing ever was."""

    errors: tuple[type[Exception], ...] = (*STORE_ERRORS, ProtocolError)

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def reason(self, error: Exception) -> str:
        """What ``error`` says, in a line that a person can act on."""
        return reason(error)

    async def read(self, key: str) -> tuple[CardRecord | None, int | None]:
        """Return what is there, and its revision."""
        self._check_connected()
        kept = await self._bucket.read(key)
        if kept.value is None:
            return None, kept.revision
        try:
            return self._bucket.opened(key, kept.value)[1], kept.revision
        except ProtocolError:
            return None, kept.revision

    async def put_over(self, record: CardRecord, over: int | None) -> int:
        """Write over a revision; return the new one. Raises OtherWrote when another one is there."""
        self._check_connected()
        return await self._bucket.write(record, over or 0)

    def _check_connected(self) -> None:
        if not self._bucket.client.is_connected:
            raise ConnectionError("not connected to NATS")
