"""An informer: the objects of one kind, kept up to date by a list and a watch."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.operator.reconcile.cluster import (
    GONE,
    Cluster,
    ClusterError,
    ClusterLost,
    RequestRefused,
    WatchChange,
)
from kvrouter.operator.reconcile.kinds import Key, Manifest, ResourceKind, key_of, version_of

WATCH_S = 300
RETRY_S = 1.0
RETRY_MAX_S = 30.0

G = TypeVar("G", bound=Hashable)


class Informer(Generic[G]):
    """The objects of a kind that ``labels`` and ``is_wanted`` pick, by place and by group. One that is wanted
    no more counts as gone.

    ``changed`` is called with every object that came, changed or went, and once for each at the start.
    ``lost`` is called with the reason when the cluster cannot be watched, and with None when it can again:
    until then what was seen last is kept. A watch that the server ends within ``retry_s`` seconds, and before
    any event, counts as failed.
    """

    def __init__(
        self,
        cluster: Cluster,
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
    ) -> None:
        self._cluster, self._kind = cluster, kind
        self._labels, self._namespace, self._is_wanted = labels, namespace, is_wanted
        self._group_of, self._changed, self._lost = group_of, changed, lost
        self._watch_s, self._retry_s = watch_s, retry_s
        self._objects: dict[Key, Manifest] = {}
        self._groups: dict[G, dict[Key, Manifest]] = {}
        self._version = ""
        self._is_lost = False
        self._has_listed_again = False
        """Whether a 410 was answered by a list since a watch last lasted: a second one counts as a loss."""
        self._failures = Failures(Backoff(retry_s, RETRY_MAX_S))
        self.synced = asyncio.Event()
        """Set once all that is there was seen."""

    def get(self, key: Key) -> Manifest | None:
        """Return the object at ``key``; None when there is none."""
        return self._objects.get(key)

    def all(self) -> Iterable[Manifest]:
        """Return every object."""
        return list(self._objects.values())

    def of_group(self, group: G) -> list[Manifest]:
        """Return the objects of one group."""
        return list(self._groups.get(group, {}).values())

    async def run(self) -> None:
        """Keep up to date until cancelled; whatever the cluster says, it is asked again."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except ClusterError as error:
                if not isinstance(error, ClusterLost):
                    self._version = ""  # a new list may fix what a watch was refused for
                if isinstance(error, RequestRefused) and error.status == GONE and not self._has_listed_again:
                    self._has_listed_again = True
                    continue
                if not self._is_lost:
                    self._lost(error)
                self._is_lost = True
                await asyncio.sleep(self._failures.next_s())

    def _found(self) -> None:
        """It is watched."""
        self._has_listed_again = False
        if self._is_lost:
            self._is_lost = False
            self._failures.reset()
            self._lost(None)

    async def _list(self) -> None:
        found = await self._cluster.find(self._kind, namespace=self._namespace, labels=self._labels)
        there = {key_of(manifest): manifest for manifest in found.objects if self._is_wanted(manifest)}
        for key in [key for key in self._objects if key not in there]:
            self._remove(self._objects[key])
        for key, manifest in there.items():
            known = self._objects.get(key)
            if known is None or version_of(known) != version_of(manifest):
                self._put(manifest)
        self._version = found.version
        self.synced.set()

    async def _follow(self) -> None:
        """Raises ClusterLost also for a watch that ends at once, lest it is opened without a pause."""
        loop = asyncio.get_running_loop()
        is_heard = False
        lasting: asyncio.TimerHandle | None = None

        def opened() -> None:
            nonlocal lasting
            lasting = loop.call_later(self._retry_s, self._found)

        seen = self._cluster.watch(
            self._kind,
            self._version,
            namespace=self._namespace,
            labels=self._labels,
            for_s=self._watch_s,
            opened=opened,
        )
        try:
            async for change, manifest in seen:
                if not is_heard:
                    is_heard = True
                    self._found()
                if change is WatchChange.DELETED or (
                    change is not WatchChange.BOOKMARK and not self._is_wanted(manifest)
                ):
                    self._remove(manifest)
                elif change is not WatchChange.BOOKMARK:
                    self._put(manifest)
                self._version = version_of(manifest)
        finally:
            if lasting is not None:
                lasting.cancel()
        if not is_heard and (lasting is None or loop.time() < lasting.when()):
            raise ClusterLost(f"watch of {self._kind.plural}: the server ends it at once")

    def _put(self, manifest: Manifest) -> None:
        self._forget(manifest)
        self._objects[key_of(manifest)] = manifest
        self._groups.setdefault(self._group_of(manifest), {})[key_of(manifest)] = manifest
        self._changed(manifest)

    def _remove(self, manifest: Manifest) -> None:
        self._forget(manifest)
        self._changed(manifest)

    def _forget(self, manifest: Manifest) -> None:
        known = self._objects.pop(key_of(manifest), None)
        if known is None:
            return
        group = self._group_of(known)
        del self._groups[group][key_of(known)]
        if not self._groups[group]:
            del self._groups[group]
