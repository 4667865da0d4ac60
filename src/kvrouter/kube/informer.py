"""The informer: follows objects of an API server by list and watch, and lists again when the watch breaks.

A list and the watch from its version form one order of events, so that no event is missed or reordered.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from math import inf
from typing import Generic, Protocol, TypeVar

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.core.errors import ProtocolError
from kvrouter.kube.client import (
    GONE,
    JSON,
    JSON_OF_METADATA,
    WATCH_S,
    ClusterError,
    ClusterLost,
    KubeClient,
    RequestRefused,
    manifest_of,
)
from kvrouter.kube.objects import Key, Manifest, ResourceKind, WatchEvent, key_of, version_of

RETRY_S = 1.0
RETRY_MAX_S = 30.0
"""The backoff of an informer, and of other repeated requests to the API server."""

FIRST_WITHIN_S = 10.0
"""Time at the start for which a kind that cannot be listed is not reported as lost: an API server refuses it
while its definition, or the right to read it, is new. Where several API servers run, a new definition is
established, and so served, after five seconds (``updateCustomResourceDefinition`` of Kubernetes'
apiextensions-apiserver).
"""

Item = TypeVar("Item")
G = TypeVar("G", bound=Hashable)


class Objects(Protocol[Item]):
    """A source to list and watch. Methods raise ClusterError, or ProtocolError for undecodable objects."""

    async def everything(self) -> tuple[list[Item], str]:
        """Return every object, and the resourceVersion of the list."""

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Watch changes after ``version``; the watch ends after a while."""


def wait_after(failures: Failures, error: Exception) -> float:
    """Count ``error``; return the seconds to wait, at least the server's Retry-After.

    Random jitter spreads many processes.
    """
    asked_s = float(getattr(error, "wait_s", 0.0))
    return max(failures.next_s(), asked_s) * random.uniform(1.0, 1.5)


class FirstTries:
    """Distinguishes failures at the start, which are temporary, from a loss."""

    def __init__(self, within_s: float = FIRST_WITHIN_S) -> None:
        self._within_s = within_s
        self._since: float | None = None
        self._worked = False

    def worked(self) -> None:
        """Treat every failure from now on as a loss."""
        self._worked = True

    def is_loss(self) -> bool:
        """Whether a failure now is a loss: it worked before, or has failed for ``within_s``."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return self._worked or now - self._since >= self._within_s


class _WatchEnd(Enum):
    """How an unbroken watch ended: the API server ended it, or this end needs a new list."""

    BY_TIME = auto()
    ON_PURPOSE = auto()


class _WatchBroken(Exception):
    """A watch failed with ``error``, or could not be reopened."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ListAndWatch(ABC, Generic[Item]):
    """Lists and watches objects; checks expiries every ``tick_s``.

    Everything is listed again after silence of ``quiet_s``, when :meth:`is_in_doubt`, when a watch breaks, or
    when the API server no longer has its version.
    """

    lives_least_s = 1.0
    """A watch that the API server ends sooner than this counts as broken."""

    def __init__(
        self,
        objects: Objects[Item],
        *,
        tick_s: float,
        quiet_s: float,
        backoff: Backoff,
    ) -> None:
        self._objects = objects
        self._tick_s = tick_s
        self._quiet_s = quiet_s
        self._received_at = 0.0
        self._version = ""
        self._failures = Failures(backoff)
        self.began = asyncio.Event()
        """Set once everything was listed, or the list failed."""

    @abstractmethod
    def take_list(self, items: list[Item], asked_at: float) -> None:
        """Take the list of all objects, requested at ``asked_at``."""

    @abstractmethod
    def take_event(self, event: WatchEvent) -> str:
        """Take one change, or a bookmark; return its resourceVersion.

        Raises ClusterError or ProtocolError for anything else.
        """

    @abstractmethod
    def lose(self, error: ClusterError) -> None:
        """Handle a failed list, or a failed watch after it; called at each attempt, except for an expired
        version (410), which a new list replaces.
        """

    def cut_off(self) -> None:
        """Handle that no changes arrive until the next list."""

    def check(self, now: float) -> None:
        """Check expiries."""

    def is_in_doubt(self, now: float) -> bool:  # noqa: ARG002 - time changes nothing here
        """Whether everything must be listed again."""
        return False

    async def tidy(self, now: float) -> None:
        """Do periodic cleanup."""

    async def run(self) -> None:
        """Deliver all objects and watch until cancelled; retry while the API server does not answer."""
        while True:
            wait_s = 0.0
            try:
                await self._watch_once()
            except _WatchBroken as broken:
                # The server may be back at once, so retry before reporting it as lost.
                wait_s = wait_after(self._failures, broken.error)
                self.cut_off()
            except (ClusterError, ProtocolError) as error:
                wait_s = wait_after(self._failures, error)
                if not (isinstance(error, RequestRefused) and error.status == GONE):
                    self.lose(error if isinstance(error, ClusterError) else ClusterLost(error.message))
                self.cut_off()
                self.began.set()
            await asyncio.sleep(wait_s)

    async def _watch_once(self) -> None:
        """List, and watch until everything must be listed again.

        Raises ClusterError when the list, or its watch, fails, and _WatchBroken when a later watch broke.
        """
        asked_at = time.monotonic()
        self.check(asked_at)
        items, version = await self._objects.everything()
        async with self._objects.watch(version) as stream:
            self._version = version
            self._received_at = time.monotonic()
            self.take_list(items, asked_at)
            self.began.set()
            ends = await self._followed(stream)
        while ends is _WatchEnd.BY_TIME:
            ends = await self._followed_again()

    async def _followed_again(self) -> _WatchEnd:
        """Open another watch where the last one ended, and take its events; return how it ended."""
        try:
            async with self._objects.watch(self._version) as stream:
                return await self._followed(stream)
        except (ClusterError, ProtocolError) as error:
            raise _WatchBroken(error) from error

    async def _followed(self, stream: AsyncIterator[list[WatchEvent]]) -> _WatchEnd:
        """Take the events of a watch until it ends; return how. Raises _WatchBroken."""
        opened_at = time.monotonic()
        reading: asyncio.Task[list[WatchEvent] | None] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(_next(stream))
                await asyncio.wait({reading}, timeout=self._tick_s)
                now = time.monotonic()
                self.check(now)
                if reading.done():
                    events, reading = reading.result(), None
                    if events is None:
                        if now - opened_at > self.lives_least_s:
                            return _WatchEnd.BY_TIME
                        raise _WatchBroken(ConnectionError())
                    self._received_at = now
                    for event in events:
                        self._version = self.take_event(event)
                    self._failures.reset()
                elif self.is_in_doubt(now) or now - self._received_at > self._quiet_s:
                    return _WatchEnd.ON_PURPOSE
                await self.tidy(now)
        except (ClusterError, ProtocolError) as error:
            raise _WatchBroken(error) from error
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading})


async def _next(stream: AsyncIterator[list[WatchEvent]]) -> list[WatchEvent] | None:
    return await anext(stream, None)


class _OfKind:
    """The objects of one kind that match labels, as :class:`Objects`."""

    def __init__(
        self, client: KubeClient, kind: ResourceKind, *, labels: str, namespace: str, watch_s: int
    ) -> None:
        self._client, self._kind = client, kind
        self._labels, self._namespace, self._watch_s = labels, namespace, watch_s

    async def everything(self) -> tuple[list[Manifest], str]:
        """Return every object, and the resourceVersion of the list."""
        found = await self._client.find(self._kind, namespace=self._namespace, labels=self._labels)
        return found.objects, found.version

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Watch changes after ``version``."""
        return self._client.watch(
            self._kind.path(self._namespace),
            version,
            labels=self._labels,
            accept=JSON_OF_METADATA if self._kind.is_metadata_enough else JSON,
            for_s=self._watch_s,
        )


class Informer(ListAndWatch[Manifest], Generic[G]):
    """The objects of a kind that match ``labels`` and ``is_wanted``, by key and by group. One that matches no
    longer counts as deleted.

    ``changed`` is called with every object that was added, changed or deleted, and once for each at the
    start; an object that moves to another group is reported with its old state too. ``lost`` is called with
    the error when the cluster cannot be watched, and with None when it can again: meanwhile the last state is
    kept. One broken watch is no loss, a second one without an event in between is; a watch that the server
    ends within ``retry_s`` seconds counts as broken. A kind that was never listed is lost once that has
    failed for ``first_within_s``.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: ResourceKind,
        *,
        labels: str = "",
        namespace: str = "",
        group_of: Callable[[Manifest], G],
        changed: Callable[[Manifest], None],
        lost: Callable[[ClusterError | None], None],
        is_wanted: Callable[[Manifest], bool] = lambda _: True,
        watch_s: int = WATCH_S,
        retry_s: float = RETRY_S,
        first_within_s: float = FIRST_WITHIN_S,
    ) -> None:
        objects = _OfKind(client, kind, labels=labels, namespace=namespace, watch_s=watch_s)
        super().__init__(
            objects,
            tick_s=retry_s,
            quiet_s=2.0 * watch_s,
            backoff=Backoff(retry_s, RETRY_MAX_S),
        )
        self.lives_least_s = retry_s
        self._kind = kind
        self._is_wanted, self._group_of = is_wanted, group_of
        self._changed, self._lost = changed, lost
        self._by_key: dict[Key, Manifest] = {}
        self._groups: dict[G, dict[Key, Manifest]] = {}
        self._is_lost = False
        self._first_tries = FirstTries(first_within_s)
        self._breaks = 0
        """The number of watches that broke in a row."""
        self._opened_at = inf
        self.synced = asyncio.Event()
        """Set once all objects were listed."""

    def get(self, key: Key) -> Manifest | None:
        """Return the object at ``key``; None without one."""
        return self._by_key.get(key)

    def all(self) -> list[Manifest]:
        """Return every object."""
        return list(self._by_key.values())

    def of_group(self, group: G) -> list[Manifest]:
        """Return the objects of one group."""
        return list(self._groups.get(group, {}).values())

    def take_list(self, items: list[Manifest], asked_at: float) -> None:  # noqa: ARG002 - an informer has no leases
        """Take the list of all objects: known ones that are missing in it are deleted."""
        there = {key_of(manifest): manifest for manifest in items if self._is_wanted(manifest)}
        for key in [key for key in self._by_key if key not in there]:
            self._remove(self._by_key[key])
        for key, manifest in there.items():
            known = self._by_key.get(key)
            if known is None or version_of(known) != version_of(manifest):
                self._put(manifest)
        self._opened_at = time.monotonic()
        self._first_tries.worked()
        self.synced.set()

    def take_event(self, event: WatchEvent) -> str:
        """Take one change, or a bookmark."""
        self._found()
        manifest = manifest_of(self._kind, event.object)
        if event.type == "DELETED" or (event.type != "BOOKMARK" and not self._is_wanted(manifest)):
            self._remove(manifest)
        elif event.type != "BOOKMARK":
            self._put(manifest)
        return version_of(manifest)

    def lose(self, error: ClusterError) -> None:
        """Report the loss; the last state is kept."""
        if not self._is_lost and self._first_tries.is_loss():
            self._is_lost = True
            self._lost(error)

    def cut_off(self) -> None:
        """Count a broken watch."""
        self._opened_at = inf
        self._breaks += 1
        if self._breaks > 1:
            self.lose(ClusterLost(f"watch of {self._kind.plural}: the server ends it at once"))

    def check(self, now: float) -> None:
        """Count a watch that lasts as working, even without events."""
        if now - self._opened_at > self.lives_least_s:
            self._found()

    def _found(self) -> None:
        self._breaks = 0
        if self._is_lost:
            self._is_lost = False
            self._failures.reset()
            self._lost(None)

    def _put(self, manifest: Manifest) -> None:
        known = self._forget(manifest)
        self._by_key[key_of(manifest)] = manifest
        self._groups.setdefault(self._group_of(manifest), {})[key_of(manifest)] = manifest
        self._notify(known, manifest)

    def _remove(self, manifest: Manifest) -> None:
        self._notify(self._forget(manifest), manifest)

    def _notify(self, known: Manifest | None, manifest: Manifest) -> None:
        if known is not None and self._group_of(known) != self._group_of(manifest):
            self._changed(known)
        self._changed(manifest)

    def _forget(self, manifest: Manifest) -> Manifest | None:
        """Remove an object; return its last state, None for an unknown one."""
        known = self._by_key.pop(key_of(manifest), None)
        if known is None:
            return None
        group = self._group_of(known)
        del self._groups[group][key_of(known)]
        if not self._groups[group]:
            del self._groups[group]
        return known
