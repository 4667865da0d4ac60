"""The informer: follows objects of an API server by list and watch, and lists again when the watch breaks.

A list and the watch that goes on from its version are one order of events, so nothing is missed, or heard
after what came later.
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
FIRST_WITHIN_S = 3.0
"""For so long at the start a kind that cannot be listed is not reported as lost: while its definition, or the
right to read it, is new, an API server refuses it."""
"""The pauses of an informer, and of what else asks the API server again and again."""

Item = TypeVar("Item")
G = TypeVar("G", bound=Hashable)


class Objects(Protocol[Item]):
    """What can be listed and watched. Both raise ClusterError, or ProtocolError for what cannot be read."""

    async def everything(self) -> tuple[list[Item], str]:
        """Return every object, and the version as of which they are all."""

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Hear what happens after ``version``, as it comes; it ends some time."""


def wait_after(failures: Failures, error: Exception) -> float:
    """Count ``error``; return the seconds to wait, at least as many as the server asks for.

    A chance part keeps many processes apart.
    """
    asked_s = float(getattr(error, "wait_s", 0.0))
    return max(failures.next_s(), asked_s) * random.uniform(1.0, 1.5)


class FirstTries:
    """Tells failures of the start, which pass by themselves, from a loss."""

    def __init__(self, within_s: float = FIRST_WITHIN_S) -> None:
        self._within_s = within_s
        self._since: float | None = None
        self._worked = False

    def worked(self) -> None:
        """From now on every failure is a loss."""
        self._worked = True

    def is_loss(self) -> bool:
        """Whether a failure of now is one: it worked before, or has failed for ``within_s``."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return self._worked or now - self._since >= self._within_s


class _Ends(Enum):
    """How a watch ended that did not break: the API server had it end, or this end wants a list."""

    BY_TIME = auto()
    ON_PURPOSE = auto()


class _WatchBroken(Exception):
    """A watch ended by ``error``, or could not be opened again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ListAndWatch(ABC, Generic[Item]):
    """Hears of writes as they happen; checks what has expired every ``tick_s``.

    When nothing was heard for ``quiet_s``, or what is followed is in doubt, everything is listed again; so it
    is when a watch breaks, or the API server no longer knows its version.
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
        self._heard_at = 0.0
        self._version = ""
        self._failures = Failures(backoff)
        self.began = asyncio.Event()
        """Set once everything was listed, or could not be."""

    @abstractmethod
    def take_list(self, items: list[Item], asked_at: float) -> None:
        """Take everything that was there at ``asked_at`` or later."""

    @abstractmethod
    def take_event(self, event: WatchEvent) -> str:
        """Take one change, or a bookmark; return its version.

        Raises ClusterError or ProtocolError for what is neither.
        """

    @abstractmethod
    def lose(self, error: ClusterError) -> None:
        """The list cannot be had, or no watch be opened after it: again at each try. Not for a version that
        the API server has already forgotten (410): a new list has another.
        """

    def cut_off(self) -> None:
        """Nothing is heard until the next list."""

    def look(self, now: float) -> None:
        """Check what has expired."""

    def is_in_doubt(self, now: float) -> bool:  # noqa: ARG002 - time changes nothing here
        """Whether everything is to be listed again."""
        return False

    async def tidy(self, now: float) -> None:
        """Do what is to be done now and then."""

    async def run(self) -> None:
        """Deliver what is there and go on watching until cancelled; an API server that does not answer is
        asked again.
        """
        while True:
            wait_s = 0.0
            try:
                await self._watch_once()
            except _WatchBroken as broken:
                # It may be back at once, and is asked before anybody is notified that it is lost.
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
        """List, and hear what comes after until everything is to be listed again.

        Raises ClusterError when the list cannot be had, or a watch cannot be opened after it, and
        _WatchBroken when one broke later.
        """
        asked_at = time.monotonic()
        self.look(asked_at)
        items, version = await self._objects.everything()
        async with self._objects.watch(version) as stream:
            self._version = version
            self._heard_at = time.monotonic()
            self.take_list(items, asked_at)
            self.began.set()
            ends = await self._followed(stream)
        while ends is _Ends.BY_TIME:
            ends = await self._followed_again()

    async def _followed_again(self) -> _Ends:
        """Open another watch where the last one ended, and take what it brings; return how it ended."""
        try:
            async with self._objects.watch(self._version) as stream:
                return await self._followed(stream)
        except (ClusterError, ProtocolError) as error:
            raise _WatchBroken(error) from error

    async def _followed(self, stream: AsyncIterator[list[WatchEvent]]) -> _Ends:
        """Take what a watch brings until it ends; return how. Raises _WatchBroken."""
        opened_at = time.monotonic()
        reading: asyncio.Task[list[WatchEvent] | None] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(_next(stream))
                await asyncio.wait({reading}, timeout=self._tick_s)
                now = time.monotonic()
                self.look(now)
                if reading.done():
                    events, reading = reading.result(), None
                    if events is None:
                        if now - opened_at > self.lives_least_s:
                            return _Ends.BY_TIME
                        raise _WatchBroken(ConnectionError())
                    self._heard_at = now
                    for event in events:
                        self._version = self.take_event(event)
                    self._failures.reset()
                elif self.is_in_doubt(now) or now - self._heard_at > self._quiet_s:
                    return _Ends.ON_PURPOSE
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
    """The objects of one kind that labels pick, as :class:`Objects`."""

    def __init__(
        self, client: KubeClient, kind: ResourceKind, *, labels: str, namespace: str, watch_s: int
    ) -> None:
        self._client, self._kind = client, kind
        self._labels, self._namespace, self._watch_s = labels, namespace, watch_s

    async def everything(self) -> tuple[list[Manifest], str]:
        """Return every object, and the version as of which they are all."""
        found = await self._client.find(self._kind, namespace=self._namespace, labels=self._labels)
        return found.objects, found.version

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Hear what happens after ``version``."""
        return self._client.watch(
            self._kind.path(self._namespace),
            version,
            labels=self._labels,
            accept=JSON_OF_METADATA if self._kind.is_metadata_enough else JSON,
            for_s=self._watch_s,
        )


class Informer(ListAndWatch[Manifest], Generic[G]):
    """The objects of a kind that ``labels`` and ``is_wanted`` pick, by place and by group. One that is wanted
    no more counts as gone.

    ``changed`` is called with every object that came, changed or went, and once for each at the start; with
    what was known of one that left its group too, so that the group hears of it.
    ``lost`` is called with the reason when the cluster cannot be watched, and with None when it can again:
    until then what was seen last is kept. One watch that breaks is no loss, a second one without an event
    between is; a watch that the server ends within ``retry_s`` seconds counts as broken. What was never
    listed is lost once that has failed for ``first_within_s``.
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
        """How many watches broke in a row."""
        self._opened_at = inf
        self.synced = asyncio.Event()
        """Set once all that is there was seen."""

    def get(self, key: Key) -> Manifest | None:
        """Return the object at ``key``; None when there is none."""
        return self._by_key.get(key)

    def all(self) -> list[Manifest]:
        """Return every object."""
        return list(self._by_key.values())

    def of_group(self, group: G) -> list[Manifest]:
        """Return the objects of one group."""
        return list(self._groups.get(group, {}).values())

    def take_list(self, items: list[Manifest], asked_at: float) -> None:  # noqa: ARG002 - a store has no clock
        """Take all objects: what is not among them is gone."""
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
        """What was seen last is kept."""
        if not self._is_lost and self._first_tries.is_loss():
            self._is_lost = True
            self._lost(error)

    def cut_off(self) -> None:
        """The watch broke, or there is none."""
        self._opened_at = inf
        self._breaks += 1
        if self._breaks > 1:
            self.lose(ClusterLost(f"watch of {self._kind.plural}: the server ends it at once"))

    def look(self, now: float) -> None:
        """A watch that lasts is one, however silent it is."""
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
        self._tell(known, manifest)

    def _remove(self, manifest: Manifest) -> None:
        self._tell(self._forget(manifest), manifest)

    def _tell(self, known: Manifest | None, manifest: Manifest) -> None:
        if known is not None and self._group_of(known) != self._group_of(manifest):
            self._changed(known)
        self._changed(manifest)

    def _forget(self, manifest: Manifest) -> Manifest | None:
        """Return what was known of it."""
        known = self._by_key.pop(key_of(manifest), None)
        if known is None:
            return None
        group = self._group_of(known)
        del self._groups[group][key_of(known)]
        if not self._groups[group]:
            del self._groups[group]
        return known
