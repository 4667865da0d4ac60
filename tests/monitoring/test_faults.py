"""A real Prometheus scrapes fleets of mock engines through faults, until the alerts about them fire."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from kvrouter.config import KvRouterConfig
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.service import event_ingest
from kvrouter.service.event_ingest import EventCacheView
from tests.monitoring.prometheus import Prometheus
from tests.support.mock_fleets import alike, pairs
from tests.support.processes import eventually
from tests.support.served import MODEL, Served, served, user, words
from tests.support.waits import until

Send = Callable[[], Awaitable[int]]


async def fires(prometheus: Prometheus, name: str, namespace: str) -> None:
    """Return once an alert fires about a fleet."""
    await asyncio.to_thread(prometheus.alertmanager.wait_for, name, namespace)


async def is_scraped(prometheus: Prometheus, namespace: str) -> None:
    """Return once Prometheus has a fleet's page, and no alert fires about it."""

    async def has_page() -> bool:
        asked = f'kvrouter_build_info{{namespace="{namespace}"}}'
        return bool(await asyncio.to_thread(prometheus.query, asked))

    await eventually(has_page)
    assert prometheus.alertmanager.fired(namespace) == set()


def scrape(prometheus: Prometheus, namespace: str, here: Served) -> None:
    host, port = here.system.address
    prometheus.scrape(namespace, f"{host}:{port}")


async def chat(here: Served, *, first: int = 0, **nvext: object) -> int:
    body = {"model": MODEL, "messages": user(words(first=first)), "max_tokens": 2, "nvext": nvext}
    return (await here.http.post("/v1/chat/completions", json=body)).status_code


@asynccontextmanager
async def sending(send: Send) -> AsyncIterator[None]:
    """Requests one after the other, ten a second, until the block ends."""

    async def go_on() -> None:
        while True:
            await send()
            await asyncio.sleep(0.1)  # a rate of requests, which nothing is awaited for

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_fleet_that_lost_its_decode_workers(prometheus: Prometheus) -> None:
    async with served(pairs()) as here, sending(lambda: chat(here)):
        scrape(prometheus, "lost-decode", here)
        await is_scraped(prometheus, "lost-decode")
        for worker_id in (2, 3, 5, 6):
            await here.kill(worker_id)
        await fires(prometheus, "KvrouterNoWorkers", "lost-decode")
        await fires(prometheus, "KvrouterRequestsFailing", "lost-decode")
        alert = prometheus.alertmanager.wait_for("KvrouterNoWorkers", "lost-decode")
        assert alert["annotations"]["summary"] == "No worker takes requests of the role decode."
    await fires(prometheus, "KvrouterFrontendDown", "lost-decode")  # the fleet has ended, its target is there


async def test_a_zone_without_decode_workers_under_fallback(prometheus: Prometheus) -> None:
    async with (
        served(pairs(enforcement="fallback")) as here,
        sending(lambda: chat(here, prefill_worker_id=1)),
    ):
        scrape(prometheus, "crosses", here)
        await is_scraped(prometheus, "crosses")
        for worker_id in (2, 3):
            await here.kill(worker_id)
        await fires(prometheus, "KvrouterKvCrossesDomain", "crosses")
        assert prometheus.alertmanager.fired("crosses") == {"KvrouterKvCrossesDomain"}


async def test_a_queue_that_is_full(prometheus: Prometheus) -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.0, admission_queue_max=1, admission_wait_s=300.0)
    async with served(alike(replicas=1, speedup=1.0), router=config) as here:
        scrape(prometheus, "queue", here)
        await is_scraped(prometheus, "queue")
        stream = await here.openai.completions.create(
            model=MODEL, prompt=words(), max_tokens=100_000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        waiting = asyncio.create_task(chat(here))
        await until(lambda: model.waiting == 1)
        async with sending(lambda: chat(here)):
            await fires(prometheus, "KvrouterQueueStanding", "queue")
            await fires(prometheus, "KvrouterQueueRefusing", "queue")
        await stream.close()
        assert await waiting == 200


async def test_an_engine_that_fails_again_and_again(prometheus: Prometheus) -> None:
    config = KvRouterConfig(circuit_open_s=600.0, circuit_open_max_s=600.0)
    async with served(alike(replicas=2), router=config) as here:
        scrape(prometheus, "circuit", here)
        await is_scraped(prometheus, "circuit")
        await here.system.fleet.workers[WorkerId(1)].engine.stop()  # its worker answers, and takes nothing
        async with sending(lambda: chat(here, backend_instance_id=1)):
            await fires(prometheus, "KvrouterCircuitOpen", "circuit")


async def test_ranks_whose_events_do_not_arrive(
    prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_ingest, "SILENT_AFTER_S", 0.1)
    async with served(alike(replicas=2)) as here:
        (model,) = here.system.service.models()
        assert isinstance(model.cache, EventCacheView)
        scrape(prometheus, "events", here)
        await fires(prometheus, "KvrouterKvEventsMissing", "events")


async def test_a_rank_whose_blocks_cannot_be_had_again(
    prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_asked(_rank: WorkerRank) -> None:
        await asyncio.Event().wait()

    async with served(alike(replicas=2)) as here:
        scrape(prometheus, "feed", here)
        await is_scraped(prometheus, "feed")
        await chat(here)
        monkeypatch.setattr(here.system.fleet.events, "recover_snapshot", is_asked)
        worker = here.system.fleet.workers[WorkerId(1)]
        (rank,) = worker.card.ranks()
        here.system.fleet.events.publish(KvBatch(rank, worker.card.incarnation, EventId(1_000_000), (), 0.0))
        await fires(prometheus, "KvrouterFeedNotLive", "feed")
