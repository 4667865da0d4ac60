"""Cordons in a key-value bucket of JetStream of their own: they have no lease, as cards have."""

import asyncio

from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from kvrouter.core.cordons import CORDONS_MAX, Cordon, cordon_digest
from kvrouter.core.errors import CordonsUnavailable, ProtocolError
from kvrouter.transports.discovery.card_tracker import StoreRefusals, TroubleSink
from kvrouter.transports.discovery.nats.bucket import STORE_ERRORS, check_majority
from kvrouter.transports.discovery.wire import (
    CORDON_MAX_BYTES,
    checked_namespace,
    decode_cordon,
    encode_cordon,
)
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth
from kvrouter.transports.nats_client import reason

ANSWER_S = 5.0
"""NATS must answer within this, else the store cannot be asked."""

READ_AT_ONCE = 64
"""How many keys are asked for at a time."""

_EXISTS = 10058
"""The server's code for a stream of that name which is configured differently."""


class NatsCordons:
    """Keeps the cordons of ``namespace``; the bucket is made with the first one.

    A record is sealed with ``token`` for its key. ``on_refused`` hears of keys that hold no cordon, once
    each. ``replicas`` is how many servers keep the bucket. The connection stays its maker's, who closes it.
    """

    look_s = 1.0

    def __init__(
        self, client: Client, *, namespace: str, token: str, on_refused: TroubleSink, replicas: int = 1
    ) -> None:
        self._client = client
        self._name = f"kvrouter-{checked_namespace(namespace)}-cordons"
        self._seal = MessageAuth(token, f"cordons 1 {namespace}")
        self._refusals = StoreRefusals(on_refused)
        self._js = client.jetstream(timeout=ANSWER_S)
        self._config = KeyValueConfig(
            bucket=self._name,
            description="kvrouter: the cordons of a namespace",
            replicas=replicas,
            max_value_size=MESSAGE_AUTH_BYTES + CORDON_MAX_BYTES,
        )
        self._read_at: tuple[object, int] | None = None
        self._cordons: tuple[Cordon, ...] = ()

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon. The server is asked for its last write, and for more where that is new."""
        try:
            return await self._read()
        except (BucketNotFoundError, NotFoundError):
            self._read_at = None
            return ()
        except STORE_ERRORS as error:
            raise self._unavailable(error) from error

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, over the one of the same level, name and source."""
        key = _key_of(cordon)
        try:
            self._check_connected()
            bucket = await self._made()
            await bucket.put(key, self._seal.seal(key, encode_cordon(cordon)))
        except STORE_ERRORS as error:
            raise self._unavailable(error) from error

    async def remove(self, cordon: Cordon) -> None:
        """Remove the cordon of this level, name and source; idempotent."""
        try:
            self._check_connected()
            await (await self._js.key_value(self._name)).delete(_key_of(cordon))
        except (BucketNotFoundError, NotFoundError):
            return
        except STORE_ERRORS as error:
            raise self._unavailable(error) from error

    async def _read(self) -> tuple[Cordon, ...]:
        self._check_connected()
        info = await self._js.stream_info(f"KV_{self._name}", subjects_filter=">")
        check_majority(self._name, info.cluster)
        read_at = info.created, info.state.last_seq
        if read_at == self._read_at:
            return self._cordons
        prefix = f"$KV.{self._name}."
        keys = sorted(subject.removeprefix(prefix) for subject in info.state.subjects or {})
        bucket = await self._js.key_value(self._name)
        found: list[Cordon | None] = []
        for at in range(0, len(keys), READ_AT_ONCE):  # of those that were removed a mark is left
            batch = keys[at : at + READ_AT_ONCE]
            found += await asyncio.gather(*(self._read_key(bucket, key) for key in batch))
        self._cordons = tuple(cordon for cordon in found if cordon is not None)[:CORDONS_MAX]
        self._read_at = read_at
        return self._cordons

    async def _read_key(self, bucket: KeyValue, key: str) -> Cordon | None:
        """None where it was removed, or is no cordon."""
        try:
            entry = await bucket.get(key)
        except KeyNotFoundError:
            return None
        try:
            cordon = decode_cordon(bytes(self._seal.opened(key, entry.value or b"")))
            if _key_of(cordon) != key:
                raise ProtocolError(f"holds the cordon of {cordon.place}", param="name")
        except ProtocolError as error:
            self._refusals.tell(key, f"key {key[:80]} of bucket {self._name}", error.message)
            return None
        self._refusals.forget(key)
        return cordon

    async def _made(self) -> KeyValue:
        try:
            return await self._js.key_value(self._name)
        except BucketNotFoundError:
            try:
                return await self._js.create_key_value(self._config)
            except APIError as error:
                if error.err_code != _EXISTS:
                    raise
                return await self._js.key_value(self._name)

    def _check_connected(self) -> None:
        if not self._client.is_connected:
            raise ConnectionError("not connected to NATS")

    def _unavailable(self, error: BaseException) -> CordonsUnavailable:
        return CordonsUnavailable(f"the bucket {self._name} cannot be used: {reason(error)}")


def _key_of(cordon: Cordon) -> str:
    return cordon_digest(cordon.level, cordon.name, cordon.source)
