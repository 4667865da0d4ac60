"""Workers that wait until nobody else has their place."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvrouter.app.attach import transport_provider
from kvrouter.app.attach.transport_provider import network_transports
from kvrouter.app.standby import holders
from kvrouter.cli.worker.engine_pods import PodsDiscovery
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import Role
from kvrouter.engines.attach import AttachSpec
from kvrouter.settings.tree import Settings
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.requests.memory import MemoryRequestTransport
from kvrouter.worker import WorkerTransports
from tests.testing.router_harness import card

ONE, TWO = WorkerId(1), WorkerId(2)


class CountedDiscovery(PodsDiscovery):
    """Knows how often it is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = 0

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        self.watches += 1
        return await super().watch(on_card, on_gone, on_store)


async def test_standby_worker_waits_for_its_own_place() -> None:
    discovery = CountedDiscovery()
    for worker_id in (ONE, TWO):
        await discovery.publish(card(worker_id))
    async with holders(discovery) as known:
        waiting = {each: asyncio.create_task(known.until_free(each)) for each in (ONE, TWO)}
        await known.until_free(WorkerId(3))
        await discovery.withdraw(TWO, card(TWO).incarnation)
        await waiting[TWO]
        assert not waiting[ONE].done()
        await discovery.withdraw(ONE, Epoch(card(ONE).incarnation + 1))
        discovery.on_store(False, "away")
        await discovery.withdraw(ONE, card(ONE).incarnation)
        await asyncio.sleep(0)
        assert not waiting[ONE].done()
        discovery.on_store(True, "")
        await waiting[ONE]


async def test_standby_workers_share_one_watch_and_connect_when_their_place_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovery, opened = CountedDiscovery(), list[str]()
    for worker_id in (ONE, TWO):
        await discovery.publish(card(worker_id))

    @asynccontextmanager
    async def transports(_: Settings, *, component: str, **__: object) -> AsyncIterator[Any]:
        opened.append(component)
        events = MemoryEventTransport()
        yield WorkerTransports(discovery, MemoryRequestTransport(), events, events)

    monkeypatch.setattr(transport_provider, "open_worker_transports", transports)
    async with network_transports(Settings()) as provider:

        async def stands(worker_id: WorkerId) -> None:
            spec = AttachSpec(kind="vllm", url="http://e", worker_id=worker_id, role=Role.PREFILL)
            attached: Any = SimpleNamespace(publishes_kv_events=True)
            async with provider.open(spec, attached):
                pass

        waiting = {each: asyncio.create_task(stands(each)) for each in (ONE, TWO)}
        await asyncio.sleep(0)
        assert (discovery.watches, opened) == (1, ["backend"])
        await discovery.withdraw(TWO, card(TWO).incarnation)
        await waiting[TWO]
        assert (discovery.watches, opened) == (1, ["backend", "prefill"])
        await discovery.withdraw(ONE, card(ONE).incarnation)
        await waiting[ONE]
