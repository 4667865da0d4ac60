"""Discovery stores that a test can lose and bring back, and somebody who listens to one."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Protocol

import nats
from msgspec import structs
from nats.aio.client import Client

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, WorkerCard
from kvrouter.transports.records.clusters import ClustersDiscovery, placed_in
from kvrouter.transports.records.file import FileDiscovery
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.records.nats import NatsDiscovery
from kvrouter.transports.records.port import CardSink, Discovery, Gone, GoneSink, StoreSink
from tests.testing.nats_server import NatsServer
from tests.testing.plain_fleets import worker_card

TOKEN = "t0p"
LEASE_S = 12.0
"""Of a worker that lives, and of who watches it: no busy machine keeps a process or a store from its work for
so long. It is renewed three times in that.
"""

SHORT_LEASE_S = 1.2
"""Of a worker that is to expire, or whose renewals a test awaits."""

POLL_S = 0.02
DEADLINE_S = 60.0
"""Only a test that fails waits as long as this."""

DiscoveryEvent = WorkerCard | tuple[int, int, Gone] | bool
"""A card, one that is gone, or whether the store answers."""


def card(worker_id: int = 1, incarnation: int = 9, *, draining: bool = False) -> WorkerCard:
    return worker_card(
        worker_id,
        incarnation=Epoch(incarnation),
        block_size=16,
        address=f"test://{worker_id}",
        draining=draining,
    )


class DiscoveryRecorder:
    """Listens to a discovery, and wakes whoever waits."""

    def __init__(self) -> None:
        self.events: list[DiscoveryEvent] = []
        self.end: Callable[[], None] = lambda: None
        self._news = asyncio.Event()

    def add(self, heard: DiscoveryEvent) -> None:
        self.events.append(heard)
        self._news.set()

    def gone(self, worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
        self.add((worker_id, incarnation, why))

    def store(self, is_reachable: bool, why: str) -> None:
        assert is_reachable or why
        self.add(is_reachable)

    def of(self, worker_id: WorkerId) -> list[DiscoveryEvent]:
        """What was heard of one worker."""
        return [
            each
            for each in self.events
            if (isinstance(each, WorkerCard) and each.worker_id == worker_id)
            or (isinstance(each, tuple) and each[0] == worker_id)
        ]

    @property
    def losses(self) -> list[DiscoveryEvent]:
        """Every worker that was said to be gone."""
        return [each for each in self.events if isinstance(each, tuple)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return once ``is_so``, which is asked after each thing heard."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():
                self._news.clear()
                await self._news.wait()

    async def until_heard(self, *heard: DiscoveryEvent) -> None:
        """Return once exactly this was heard, or fail with what was."""
        with suppress(TimeoutError):
            await self.until(lambda: len(self.events) >= len(heard))
        assert self.events == [*heard]


async def record_discovery(discovery: Discovery) -> DiscoveryRecorder:
    recorder = DiscoveryRecorder()
    recorder.end = await discovery.watch(recorder.add, recorder.gone, recorder.store)
    return recorder


class Store(Protocol):
    """A store that several processes use, each with an end of its own."""

    def end(self, *, lease_s: float = LEASE_S) -> Discovery: ...

    async def lose(self) -> None: ...

    async def bring_back(self, *, is_empty: bool) -> None: ...


class MemoryStore:
    """One process: both ends are the same, and nothing is ever lost."""

    def __init__(self) -> None:
        self._only = MemoryDiscovery()

    def end(self, *, lease_s: float = LEASE_S) -> Discovery:
        return self._only

    async def lose(self) -> None:
        raise NotImplementedError

    async def bring_back(self, *, is_empty: bool) -> None:
        raise NotImplementedError


def ignore_reports(*_reported: object) -> None:
    """Nobody is notified."""


class FileStore:
    """A directory; while it is lost, a file stands in its place."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "cards"
        self._aside = folder / "aside"
        self.ends: list[FileDiscovery] = []
        self.troubles: list[tuple[str, str]] = []
        self.refusals: list[tuple[str, str]] = []

    def end(self, *, on_lost: GoneSink | None = None, lease_s: float = LEASE_S) -> FileDiscovery:
        made = FileDiscovery(
            self.directory,
            namespace="space",
            on_lost=on_lost,
            on_trouble=lambda *trouble: self.troubles.append(trouble),
            on_refused=lambda *refusal: self.refusals.append(refusal),
            lease_s=lease_s,
            poll_s=POLL_S,
        )
        self.ends.append(made)
        return made

    async def lose(self) -> None:
        self.directory.rename(self._aside)
        self.directory.write_text("in the way")

    async def bring_back(self, *, is_empty: bool) -> None:
        self.directory.unlink()
        if is_empty:
            shutil.rmtree(self._aside)
        else:
            self._aside.rename(self.directory)


class WithoutPlacement:
    """Several clusters as one discovery, whose cards are handed on as they were published."""

    def __init__(self, clusters: ClustersDiscovery) -> None:
        self._clusters = clusters
        self.propagation_s = clusters.propagation_s

    async def publish(self, card: WorkerCard) -> None:
        await self._clusters.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        await self._clusters.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        def on_placed(placed: WorkerCard) -> None:
            assert placed == placed_in("here", placed)
            on_card(structs.replace(placed, runtime_config=ModelRuntimeConfig()))

        return await self._clusters.watch(on_placed, on_gone, on_store)

    async def close(self) -> None:
        await self._clusters.close()


class ClustersStore(FileStore):
    """A directory is the own cluster's store; in the other cluster is nobody."""

    def end(self, *, on_lost: GoneSink | None = None, lease_s: float = LEASE_S) -> WithoutPlacement:  # type: ignore[override] # the same store, seen by another adapter
        clusters: dict[str, Discovery] = {
            "here": super().end(on_lost=on_lost, lease_s=lease_s),
            "there": MemoryDiscovery(),
        }
        return WithoutPlacement(
            ClustersDiscovery(clusters, on_refused=lambda *refusal: self.refusals.append(refusal))
        )


class NatsStore:
    """A bucket of a namespace of its own; while it is lost, there is no server."""

    def __init__(self, server: NatsServer, clients: list[Client]) -> None:
        self.server = server
        self.namespace = f"test-{secrets.token_hex(8)}"
        self.ends: list[NatsDiscovery] = []
        self.troubles: list[tuple[str, str]] = []
        self.refusals: list[tuple[str, str]] = []
        self._clients = cycle(clients)

    @property
    def bucket(self) -> str:
        return f"kvrouter-{self.namespace}-workers"

    def client(self) -> Client:
        """The connection of one process or another."""
        return next(self._clients)

    def end(self, *, on_lost: GoneSink | None = None, lease_s: float = LEASE_S) -> NatsDiscovery:
        made = NatsDiscovery(
            self.client(),
            namespace=self.namespace,
            token=TOKEN,
            on_trouble=lambda *trouble: self.troubles.append(trouble),
            on_refused=lambda *refusal: self.refusals.append(refusal),
            on_lost=on_lost,
            lease_s=lease_s,
        )
        self.ends.append(made)
        return made

    async def lose(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def bring_back(self, *, is_empty: bool) -> None:
        if is_empty:
            shutil.rmtree(self.server.folder / "store")
        await asyncio.to_thread(self.server.start)


@asynccontextmanager
async def memory_store(folder: Path, server: NatsServer | None) -> AsyncIterator[MemoryStore]:
    yield MemoryStore()


@asynccontextmanager
async def file_store(folder: Path, server: NatsServer | None = None) -> AsyncIterator[FileStore]:
    store = FileStore(folder)
    try:
        yield store
    finally:
        for end in store.ends:
            await end.close()


@asynccontextmanager
async def clusters_store(folder: Path, server: NatsServer | None = None) -> AsyncIterator[ClustersStore]:
    store = ClustersStore(folder)
    try:
        yield store
    finally:
        for end in store.ends:
            await end.close()


@asynccontextmanager
async def nats_store(folder: Path | None, server: NatsServer | None) -> AsyncIterator[NatsStore]:
    assert server is not None
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nats_connection(server)) for _ in range(3)]
        store = NatsStore(server, clients)
        try:
            yield store
        finally:
            for end in store.ends:
                await end.close()


@asynccontextmanager
async def nats_connection(server: NatsServer) -> AsyncIterator[Client]:
    """A connection that comes back soon."""

    async def ignore(_error: Exception) -> None:
        """What goes wrong is seen where it is awaited."""

    client = await nats.connect(
        server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=ignore, ping_interval=1
    )
    try:
        yield client
    finally:
        await client.close()


STORES: dict[str, Callable[[Path, NatsServer | None], AbstractAsyncContextManager[Store]]] = {
    "memory": memory_store,
    "file": file_store,
    "clusters": clusters_store,
    "nats": nats_store,
}
