"""A cluster for tests of the operator in which nothing changes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from kvrouter.operator.reconcile.cluster import Cluster, ObjectList, WatchChange
from kvrouter.operator.reconcile.kinds import Key, Manifest, ResourceKind, key_of


class QuietCluster(Cluster):
    """Has these objects. Without mutating policies and of version 1.35, it copies the labels of Bindings."""

    def __init__(self, objects: Mapping[ResourceKind, Sequence[Manifest]]) -> None:
        self.objects = objects
        self.listed: asyncio.Queue[ResourceKind] = asyncio.Queue()
        self.watched = asyncio.Event()

    async def served(self, group_version: str) -> frozenset[str]:
        return frozenset()

    async def version(self) -> tuple[int, int]:
        return (1, 35)

    async def find(self, kind: ResourceKind, *, namespace: str = "", labels: str = "") -> ObjectList:
        self.listed.put_nowait(kind)
        return ObjectList([*self.objects.get(kind, ())], "1")

    async def read(self, kind: ResourceKind, key: Key) -> Manifest | None:
        return next((each for each in self.objects.get(kind, ()) if key_of(each) == key), None)

    async def watch(
        self,
        kind: ResourceKind,
        version: str,
        *,
        namespace: str = "",
        labels: str = "",
        for_s: int,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[tuple[WatchChange, Manifest], None]:
        self.watched.set()
        await asyncio.Event().wait()
        yield WatchChange.BOOKMARK, {}
