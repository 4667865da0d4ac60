"""A cluster for tests of the operator in which nothing changes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from kvrouter.kube.client import KubeClient, ObjectList
from kvrouter.kube.objects import Key, Manifest, ResourceKind, WatchEvent, key_of


class StaticCluster(KubeClient):
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

    @asynccontextmanager
    async def watch(
        self, path: str, version: str, *, labels: str = "", accept: str = "", for_s: int = 0
    ) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        self.watched.set()
        yield self._nothing()

    async def _nothing(self) -> AsyncIterator[list[WatchEvent]]:
        await asyncio.Event().wait()
        yield []
