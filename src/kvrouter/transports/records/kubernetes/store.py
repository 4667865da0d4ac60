"""Records of a fleet as objects of a Kubernetes API server."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.core.errors import ProtocolError
from kvrouter.kube.client import (
    CONFLICT,
    NOT_FOUND,
    ClusterError,
    ClusterUser,
    KubeClient,
    RequestRefused,
    decoded,
)
from kvrouter.kube.informer import wait_after
from kvrouter.kube.objects import FLEET_LABEL, ResourceKind, WatchEvent, fleet_object, name_in_fleet
from kvrouter.transports.records.card_tracker import RENEWALS_PER_LEASE, StoreRefusals, TroubleSink
from kvrouter.transports.records.encoding import CardRecord
from kvrouter.transports.records.kubernetes.api import RETRY_MAX_S, RETRY_S, InformerFeed, reason
from kvrouter.transports.records.kubernetes.objects import (
    OwnerReference,
    StoredObject,
    checked_fleet,
    encode_object,
)
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.store import ChangeFeed, Record, RecordKind, VersionConflict

TICKS_PER_LEASE = 20
TICK_MAX_S = 0.2
"""A watcher checks more often than twice in the shortest lease that the settings allow."""

QUIET_LEASES = 0.5
"""The part of a lease after which a silent API server is listed again."""

SOONEST = 0.8
"""The least part of the renewal interval to wait: random waits spread workers that start together."""

T = TypeVar("T")


class ObjectVersion(NamedTuple):
    """A version of an object: its uid, its resourceVersion, and its owners."""

    uid: str
    version: str
    owners: tuple[OwnerReference, ...]


class ObjectRecords(Generic[T]):
    """Keeps the records of ``kind`` of one fleet as objects of ``resource``, in the user's Kubernetes
    namespace. An object's name is made of its fleet and the record's key.

    ``answer_s`` is how long the API server may take for an answer. ``on_refused`` is called for objects that
    hold no record, once for all watches. ``rights`` are verbs for messages about missing rights.
    """

    unit = "object"
    errors: tuple[type[Exception], ...] = (ClusterError, ProtocolError)

    def __init__(
        self,
        user: ClusterUser,
        kind: RecordKind[T],
        resource: ResourceKind,
        *,
        fleet: str,
        answer_s: float,
        on_refused: TroubleSink,
        lease_s: float = 0.0,
        rights: str = "",
    ) -> None:
        self.kind = kind
        self.lease_s = lease_s
        self.fleet = checked_fleet(fleet)
        self.refusals = StoreRefusals(on_refused)
        self._resource = resource
        self._namespace = user.namespace
        self._path = resource.path(user.namespace)
        self._client = KubeClient(user.connection(), answer_s=answer_s)
        self._rights = rights
        self._writes = 0
        self._in_a_row = Failures(
            Backoff(RETRY_S, min(lease_s / RENEWALS_PER_LEASE or RETRY_MAX_S, RETRY_MAX_S))
        )

    def reason(self, error: Exception) -> str:
        """Return ``error`` as one line that a person can act on."""
        return reason(error, self._resource, rights=self._rights)

    async def list_all(self) -> list[Record[T, ObjectVersion]]:
        """Return every record."""
        found, _ = await self.everything()
        records: list[Record[T, ObjectVersion]] = []
        for each in found[: self.kind.records_max]:
            self.deliver(each, records.append)
        return records

    def changes(self: "ObjectRecords[CardRecord]", watch: LeasedWatch[ObjectVersion]) -> ChangeFeed:
        """Return a feed that lists and watches the objects for ``watch``."""
        return ObjectFeed(self, watch)

    async def read(self, key: str) -> tuple[T | None, ObjectVersion | None]:
        """Return the record and its version; (None, its version) for an object that holds no record."""
        try:
            found = decoded(await self._client.ask("GET", self._url(self.name_of(key))), StoredObject)
        except RequestRefused as error:
            if error.status == NOT_FOUND:
                return None, None
            raise
        try:
            return self.opened(found).value, object_version(found)
        except ProtocolError:
            return None, object_version(found)

    async def put(self, value: T) -> None:
        """Write a record by server-side apply, regardless of the current version."""
        spec = json.loads(self.kind.encode(value))
        key = self.kind.key_of(value)
        manifest = fleet_object(self._resource, key, spec, namespace=self._namespace, fleet=self.fleet)
        await self._client.apply(self._resource, manifest)

    async def put_over(self, value: T, over: ObjectVersion | None) -> ObjectVersion:
        """Replace the version ``over`` (None: create). Raises VersionConflict at another version."""
        self._writes += 1
        name = name_in_fleet(self.fleet, self.kind.key_of(value))
        body = encode_object(
            self._resource,
            name,
            self.kind.encode(value),
            fleet=self.fleet,
            renewals=self._writes,
            replaces="" if over is None else over.version,
            owners=self.owners_of(value, over),
        )
        try:
            if over is None:
                answer = await self._client.ask("POST", self._path, body=body)
            else:
                answer = await self._client.ask("PUT", self._url(name), body=body)
        except RequestRefused as error:
            if error.status == CONFLICT or (error.status == NOT_FOUND and over is not None):
                raise VersionConflict(f"the object {name} is another by now") from error
            raise
        return object_version(decoded(answer, StoredObject))

    async def delete(self, key: str, version: ObjectVersion | None = None) -> None:
        """Delete this version of an object (None: any); idempotent."""
        options = {} if version is None else {"preconditions": {"resourceVersion": version.version}}
        try:
            await self._client.ask("DELETE", self._url(self.name_of(key)), body=msgspec.json.encode(options))
        except RequestRefused as error:
            if error.status == CONFLICT:
                raise VersionConflict(f"the object {key} is another by now") from error
            if error.status != NOT_FOUND:
                raise

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return after most of a third of the lease; after failures, with backoff."""
        if failures:
            await asyncio.sleep(wait_after(self._in_a_row, failures[0]))
        else:
            self._in_a_row.reset()
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE * random.uniform(SOONEST, 1.0))

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._client.close()

    # List and watch

    async def everything(self) -> tuple[list[StoredObject], str]:
        """Return every object of the fleet, and the resourceVersion of the list."""
        found, version = await self._client.everything(self._path, labels=self._selector())
        return [decoded(bytes(each), StoredObject) for each in found], version

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Watch changes after ``version``. The watch is open when the context is entered; it times out."""
        return self._client.watch(self._path, version, labels=self._selector())

    def deliver(self, found: StoredObject, take: Callable[[Record[T, ObjectVersion]], None]) -> str | None:
        """Pass an object's record to ``take``; return its key. Report an object without one; return None."""
        name = found.metadata.name
        try:
            record = self.opened(found)
            take(record)
        except ProtocolError as error:
            self.refusals.report(name, self.called(name), error.message)
            return None
        self.refusals.forget(name)
        return record.key

    # Overridden by kinds of records

    def called(self, name: str) -> str:
        """Return how reports name an object."""
        return f"object {name[:80]}"

    def name_of(self, key: str) -> str:
        """Return the name of the object with this key."""
        return name_in_fleet(self.fleet, key)

    def key_of(self, found: StoredObject) -> str | None:
        """Return the key of an object, by its name; None for a name that is not of this fleet."""
        _, _, key = found.metadata.name.rpartition("-")
        is_ours = name_in_fleet(self.fleet, key) == found.metadata.name and self.kind.key.fullmatch(key)
        return key if is_ours else None

    def opened(self, found: StoredObject) -> Record[T, ObjectVersion]:
        """Return the record in an object. Raises ProtocolError for an object that holds no valid one."""
        key = self.key_of(found)
        if key is None:
            raise ProtocolError(
                f"its name is not {self.name_of('')}<{self.kind.name} id>", param=self.kind.param
            )
        return Record(key, self.kind.checked(key, bytes(found.spec)), object_version(found))

    def owners_of(self, value: T, over: ObjectVersion | None) -> tuple[OwnerReference, ...]:  # noqa: ARG002 - by default no owner
        """Return the owners for the object of ``value``, which replaces ``over``."""
        return ()

    def _selector(self) -> str:
        return f"{FLEET_LABEL}={self.fleet}"

    def _url(self, name: str) -> str:
        return f"{self._path}/{name}"


def object_version(found: StoredObject) -> ObjectVersion:
    """Return the version of an object."""
    metadata = found.metadata
    return ObjectVersion(metadata.uid, metadata.resource_version, metadata.owner_references)


class ObjectFeed(InformerFeed[StoredObject]):
    """Watches the objects of cards, and checks leases several times in one.

    When a lease has run out, or the watch was silent for a part of one, everything is listed again. When the
    API server does not answer, the store is lost; when it is back, every lease restarts.
    """

    def __init__(self, store: ObjectRecords[CardRecord], watch: LeasedWatch[ObjectVersion]) -> None:
        super().__init__(
            store,
            name="discovery: watch objects",
            tick_s=min(store.lease_s / TICKS_PER_LEASE, TICK_MAX_S),
            quiet_s=QUIET_LEASES * store.lease_s,
        )
        self._store = store
        self._watch = watch
        self._is_cut_off = False

    def check(self, now: float) -> None:
        """Record the time of a check."""
        self._watch.check(now)

    def is_in_doubt(self, now: float) -> bool:
        """Whether a lease ran out: its object is read again before it expires."""
        return bool(self._watch.overdue(now))

    def cut_off(self) -> None:
        """Note that no changes arrive until the next list: no lease expires meanwhile."""
        self._is_cut_off = True

    def lose(self, error: ClusterError) -> None:
        """Report the API server as lost."""
        self._watch.lose(self._store.reason(error))

    def take_list(self, items: list[StoredObject], asked_at: float) -> None:
        """Take the list requested at ``asked_at``, and expire the leases that had run out by then."""
        if self._is_cut_off:
            self._is_cut_off = False
            self._watch.regain()
        keys = [self._store.deliver(each, self._watch.take) for each in items]
        self._watch.settle(asked_at, {key for key in keys if key is not None})

    def take_event(self, event: WatchEvent) -> str:
        """Take one change; return its resourceVersion."""
        found = decoded(bytes(event.object), StoredObject)
        if event.type == "DELETED":
            key = self._store.key_of(found)
            if key is not None:
                self._watch.drop(key)
            self._store.refusals.forget(found.metadata.name)
        elif event.type != "BOOKMARK":
            self._store.deliver(found, self._watch.take)
        return found.metadata.resource_version

    async def tidy(self, now: float) -> None:
        """Remove objects that were not written for long."""
        await self._watch.tidy(now)
