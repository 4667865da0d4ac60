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
from kvrouter.transports.discovery.card_tracker import RENEWALS_PER_LEASE, StoreRefusals, TroubleSink
from kvrouter.transports.discovery.kubernetes.api import RETRY_MAX_S, RETRY_S, Follow, reason
from kvrouter.transports.discovery.kubernetes.objects import (
    OwnerReference,
    StoredObject,
    checked_fleet,
    encode_object,
)
from kvrouter.transports.discovery.leased_watch import LeasedWatch
from kvrouter.transports.discovery.records import ChangeFeed, OtherWrote, Record, RecordKind
from kvrouter.transports.discovery.wire import CardRecord

TICKS_PER_LEASE = 20
TICK_MAX_S = 0.2
"""A watcher checks more often than twice in the shortest lease that the settings allow."""

QUIET_LEASES = 0.5
"""For how much of a lease a watcher believes in an API server from which it hears nothing."""

SOONEST = 0.8
"""Renewals come after this part of their time at the soonest: workers that start together drift apart."""

T = TypeVar("T")


class Stood(NamedTuple):
    """A version of an object: which object it is, its version, and who owns it."""

    uid: str
    version: str
    owners: tuple[OwnerReference, ...]


class ObjectRecords(Generic[T]):
    """Keeps the records of ``kind`` of one fleet as objects of ``resource``, in the user's namespace of
    Kubernetes. The name of an object is its fleet's and the record's key.

    ``answer_s`` is how long the API server may take for an answer.
    ``on_refused`` hears of objects that hold no record, once however many watch. ``rights`` are the verbs
    that the user needs, where an error says more than that some are missing.
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
        """What ``error`` says, in a line that a person can act on."""
        return reason(error, self._resource, rights=self._rights)

    async def list_all(self) -> list[Record[T, Stood]]:
        """Return every record."""
        found, _ = await self.everything()
        records: list[Record[T, Stood]] = []
        for each in found[: self.kind.records_max]:
            self.hand_on(each, records.append)
        return records

    def changes(self: "ObjectRecords[CardRecord]", watch: LeasedWatch[Stood]) -> ChangeFeed:
        """Return what lists and watches for ``watch``."""
        return ObjectFeed(self, watch)

    async def read(self, key: str) -> tuple[T | None, Stood | None]:
        """Return what is there."""
        try:
            found = decoded(await self._client.ask("GET", self._url(self.name_of(key))), StoredObject)
        except RequestRefused as error:
            if error.status == NOT_FOUND:
                return None, None
            raise
        try:
            return self.opened(found).value, stood(found)
        except ProtocolError:
            return None, stood(found)

    async def put(self, value: T) -> None:
        """Make an object so, regardless of who wrote it before."""
        spec = json.loads(self.kind.encode(value))
        key = self.kind.key_of(value)
        manifest = fleet_object(self._resource, key, spec, namespace=self._namespace, fleet=self.fleet)
        await self._client.apply(self._resource, manifest)

    async def put_over(self, value: T, over: Stood | None) -> Stood:
        """Write over a version, or where none is. Raises OtherWrote when something else is there."""
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
                raise OtherWrote(f"the object {name} is another by now") from error
            raise
        return stood(decoded(answer, StoredObject))

    async def delete(self, key: str, version: Stood | None = None) -> None:
        """Delete an object as of this version, or whatever is there; idempotent."""
        options = {} if version is None else {"preconditions": {"resourceVersion": version.version}}
        try:
            await self._client.ask("DELETE", self._url(self.name_of(key)), body=msgspec.json.encode(options))
        except RequestRefused as error:
            if error.status == CONFLICT:
                raise OtherWrote(f"the object {key} is another by now") from error
            if error.status != NOT_FOUND:
                raise

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return after most of a part of the lease; sooner where it failed, later again and again."""
        if failures:
            await asyncio.sleep(wait_after(self._in_a_row, failures[0]))
        else:
            self._in_a_row.reset()
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE * random.uniform(SOONEST, 1.0))

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._client.close()

    # What is listed and watched

    async def everything(self) -> tuple[list[StoredObject], str]:
        """Return every object of the fleet, and the version as of which they are all."""
        found, version = await self._client.everything(self._path, labels=self._selector())
        return [decoded(bytes(each), StoredObject) for each in found], version

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Hear what happens after ``version``, as it comes; open when this is entered, it ends some time."""
        return self._client.watch(self._path, version, labels=self._selector())

    def hand_on(self, found: StoredObject, take: Callable[[Record[T, Stood]], None]) -> str | None:
        """Have the record in an object taken; return its key, or None for what is none, which is reported."""
        name = found.metadata.name
        try:
            record = self.opened(found)
            take(record)
        except ProtocolError as error:
            self.refusals.tell(name, self.called(name), error.message)
            return None
        self.refusals.forget(name)
        return record.key

    # What kinds differ in

    def called(self, name: str) -> str:
        """What reports call an object."""
        return f"object {name[:80]}"

    def name_of(self, key: str) -> str:
        """Return the name of the object that has this key."""
        return name_in_fleet(self.fleet, key)

    def key_of(self, found: StoredObject) -> str | None:
        """Return the key of an object, by its name; None for a name that none of ours has."""
        _, _, key = found.metadata.name.rpartition("-")
        is_ours = name_in_fleet(self.fleet, key) == found.metadata.name and self.kind.key.fullmatch(key)
        return key if is_ours else None

    def opened(self, found: StoredObject) -> Record[T, Stood]:
        """Return the record in an object. Raises ProtocolError that names what makes it none."""
        key = self.key_of(found)
        if key is None:
            raise ProtocolError(
                f"its name is not {self.name_of('')}<{self.kind.name} id>", param=self.kind.param
            )
        return Record(key, self.kind.checked(key, bytes(found.spec)), stood(found))

    def owners_of(self, value: T, over: Stood | None) -> tuple[OwnerReference, ...]:  # noqa: ARG002 - as a rule nobody
        """Return who owns the object of a record that is written over another."""
        return ()

    def _selector(self) -> str:
        return f"{FLEET_LABEL}={self.fleet}"

    def _url(self, name: str) -> str:
        return f"{self._path}/{name}"


def stood(found: StoredObject) -> Stood:
    """Return the version of an object."""
    metadata = found.metadata
    return Stood(metadata.uid, metadata.resource_version, metadata.owner_references)


class ObjectFeed(Follow[StoredObject]):
    """Hears of writes as they happen; checks the leases several times in one.

    When a lease has run out, or nothing was heard for a part of one, everything is listed again. An API
    server that does not answer is lost; one that comes back gives every lease its whole length.
    """

    def __init__(self, store: ObjectRecords[CardRecord], watch: LeasedWatch[Stood]) -> None:
        super().__init__(
            store,
            name="discovery: watch objects",
            tick_s=min(store.lease_s / TICKS_PER_LEASE, TICK_MAX_S),
            quiet_s=QUIET_LEASES * store.lease_s,
        )
        self._store = store
        self._watch = watch
        self._is_cut_off = False

    def look(self, now: float) -> None:
        """See which leases run out."""
        self._watch.look(now)

    def is_in_doubt(self, now: float) -> bool:
        """Whether a lease ran out: its object is read again before that is believed."""
        return bool(self._watch.overdue(now))

    def cut_off(self) -> None:
        """Nothing is heard until the next list: no lease runs out meanwhile."""
        self._is_cut_off = True

    def lose(self, error: ClusterError) -> None:
        """The API server cannot be asked."""
        self._watch.lose(self._store.reason(error))

    def take_list(self, items: list[StoredObject], asked_at: float) -> None:
        """Take what was asked for at ``asked_at``, and believe the leases that had run out by then."""
        if self._is_cut_off:
            self._is_cut_off = False
            self._watch.regain()
        keys = [self._store.hand_on(each, self._watch.take) for each in items]
        self._watch.settle(asked_at, {key for key in keys if key is not None})

    def take_event(self, event: WatchEvent) -> str:
        """Take one change; return its version."""
        found = decoded(bytes(event.object), StoredObject)
        if event.type == "DELETED":
            key = self._store.key_of(found)
            if key is not None:
                self._watch.drop(key)
            self._store.refusals.forget(found.metadata.name)
        elif event.type != "BOOKMARK":
            self._store.hand_on(found, self._watch.take)
        return found.metadata.resource_version

    async def tidy(self, now: float) -> None:
        """Remove objects that nobody has written for long."""
        await self._watch.tidy(now)
