"""A real Prometheus scrapes fleets of mock engines through faults, until the alerts about them fire."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from kvrouter.app.traffic_recording import recording
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.events import Cleared, KvBatch
from kvrouter.core.ids import EventId, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg
from kvrouter.kube.objects import Key, Manifest, ResourceKind
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth
from kvrouter.operator.reconcile.controller import Controller
from kvrouter.operator.servers import serve_probes
from kvrouter.router import event_ingest
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Telemetry
from kvrouter.telemetry.families import MetricsFormat
from tests.system.monitoring.prometheus import Prometheus
from tests.testing.asyncio_servers import port_of, serving
from tests.testing.constants import SetConstants
from tests.testing.fleet_processes import NATS_TCP_JETSTREAM_SYNC
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, leave_recovery_unanswered, mock_server, user, words
from tests.testing.nats_server import NatsServer
from tests.testing.planned_deployments import DEFAULTS, deployment
from tests.testing.processes import eventually, fleet
from tests.testing.router_harness import RouterHarness, decode_card, prefill_card, read_all
from tests.testing.scripted_engine import VLLM_PAGES, scripted_engine
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport
from tests.testing.static_cluster import StaticCluster
from tests.testing.waits import until

Send = Callable[[], Awaitable[int]]


async def fires(prometheus: Prometheus, name: str, namespace: str) -> None:
    """Return once an alert fires about a fleet."""
    await asyncio.to_thread(prometheus.alertmanager.wait_for, name, namespace)


async def until_scraped(prometheus: Prometheus, namespace: str) -> None:
    """Return once Prometheus has a fleet's page, and no alert fires about it."""

    async def has_page() -> bool:
        asked = f'kvrouter_build_info{{namespace="{namespace}"}}'
        return bool(await asyncio.to_thread(prometheus.query, asked))

    await eventually(has_page)
    assert prometheus.alertmanager.fired(namespace) == set()


def scrape(prometheus: Prometheus, namespace: str, here: MockServer) -> None:
    host, port = here.system.address
    prometheus.scrape(namespace, f"{host}:{port}")


async def chat(here: MockServer, *, first: int = 0, **nvext: object) -> int:
    body = {"model": MODEL, "messages": user(words(first=first, n=100)), "max_tokens": 2, "nvext": nvext}
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


@asynccontextmanager
async def page_of(telemetry: Telemetry) -> AsyncIterator[str]:
    """Serve the metrics of a router that has no door; answers with the address."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=telemetry.render(), headers={"Content-Type": MetricsFormat.TEXT.value})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with serving(app) as server:
        yield f"127.0.0.1:{port_of(server)}"


class AcceptingCluster(StaticCluster):
    """Takes every write, and runs no pods."""

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        return manifest

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return manifest


async def test_lost_decode_workers_fire_no_workers_and_requests_failing(prometheus: Prometheus) -> None:
    async with mock_server(zoned_fleet()) as here, sending(lambda: chat(here)):
        scrape(prometheus, "lost-decode", here)
        await until_scraped(prometheus, "lost-decode")
        for worker_id in (2, 3, 5, 6):
            await here.kill(worker_id)
        await fires(prometheus, "KvrouterNoWorkers", "lost-decode")
        await fires(prometheus, "KvrouterRequestsFailing", "lost-decode")
        alert = prometheus.alertmanager.wait_for("KvrouterNoWorkers", "lost-decode")
        assert alert["annotations"]["summary"] == "No worker takes requests of the role decode."
    await fires(prometheus, "KvrouterFrontendDown", "lost-decode")  # the fleet has ended, its target is there


async def test_kv_crossing_zones_under_fallback_fires_its_alert(prometheus: Prometheus) -> None:
    async with (
        mock_server(zoned_fleet(enforcement="fallback")) as here,
        sending(lambda: chat(here, prefill_worker_id=1)),
    ):
        scrape(prometheus, "crosses", here)
        await until_scraped(prometheus, "crosses")
        for worker_id in (2, 3):
            await here.kill(worker_id)
        await fires(prometheus, "KvrouterKvCrossesDomain", "crosses")
        assert prometheus.alertmanager.fired("crosses") == {"KvrouterKvCrossesDomain"}


async def test_a_full_queue_fires_the_queue_alerts(prometheus: Prometheus) -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.0, admission_queue_max=1, admission_wait_s=300.0)
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0), router=config) as here:
        scrape(prometheus, "queue", here)
        await until_scraped(prometheus, "queue")
        stream = await here.openai.completions.create(
            model=MODEL, prompt=words(), max_tokens=100_000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        waiting = asyncio.create_task(chat(here))
        await until(lambda: len(model.placer.waiting) == 1)
        async with sending(lambda: chat(here)):
            await fires(prometheus, "KvrouterQueueStanding", "queue")
            await fires(prometheus, "KvrouterQueueRefusing", "queue")
        await stream.close()
        assert await waiting == 200


async def test_a_failing_engine_fires_the_circuit_alert(prometheus: Prometheus) -> None:
    config = KvRouterConfig(circuit_open_s=600.0, circuit_open_max_s=600.0)
    async with mock_server(uniform_fleet(replicas=2), router=config) as here:
        scrape(prometheus, "circuit", here)
        await until_scraped(prometheus, "circuit")
        await here.system.fleet.workers[WorkerId(1)].engine.stop()  # its worker answers, and takes nothing
        async with sending(lambda: chat(here, backend_instance_id=1)):
            await fires(prometheus, "KvrouterCircuitOpen", "circuit")


async def test_missing_kv_events_fire_their_alert(
    prometheus: Prometheus, set_constants: SetConstants
) -> None:
    set_constants(event_ingest, SILENT_AFTER_S=0.1)
    async with mock_server(uniform_fleet(replicas=2)) as here:
        (model,) = here.system.service.models()
        assert isinstance(model.cache, EventCacheView)
        scrape(prometheus, "events", here)
        await fires(prometheus, "KvrouterKvEventsMissing", "events")


async def test_an_unrecoverable_feed_fires_its_alert(
    prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        scrape(prometheus, "feed", here)
        await until_scraped(prometheus, "feed")
        await chat(here)
        leave_recovery_unanswered(monkeypatch, here)
        worker = here.system.fleet.workers[WorkerId(1)]
        (rank,) = worker.card.ranks()
        here.system.fleet.events.publish(KvBatch(rank, worker.card.incarnation, EventId(1_000_000), (), 0.0))
        await fires(prometheus, "KvrouterFeedNotLive", "feed")


async def test_a_wrong_index_fires_its_alert(prometheus: Prometheus) -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        slot = model.fleet.slot_of(*here.system.fleet.workers[WorkerId(1)].card.ranks())
        assert slot is not None

        async def send() -> int:
            cache.index.apply(slot, (Cleared(),))
            return await chat(here)

        scrape(prometheus, "index", here)
        await until_scraped(prometheus, "index")
        async with sending(send):
            await fires(prometheus, "KvrouterIndexWrong", "index")
        alert = prometheus.alertmanager.wait_for("KvrouterIndexWrong", "index")
        assert alert["labels"]["prediction"] == "too_few"


async def test_a_recording_whose_folder_is_gone_fires_its_alert(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    folder, telemetry = tmp_path / "recorded", Telemetry()
    async with recording(RecordingSettings(folder=str(folder)), telemetry) as traffic:
        assert traffic is not None
        folder.rename(tmp_path / "elsewhere")
        async with page_of(telemetry) as address:
            prometheus.scrape("recording", address)
            traffic.call_refused(InvalidRequest("no"), route="/v1/completions", model=None, received_s=0.0)
            await fires(prometheus, "KvrouterRecordingEnded", "recording")


async def test_handoffs_losing_their_kv_fire_their_alert(prometheus: Prometheus) -> None:
    def lose(stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            block = {"block": 7}
            stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params=block))
        elif stream.request.leg is Leg.DECODE:
            stream.feed(EngineChunk(finish=FinishReason.ERROR, error="no way", kv_lost=KvLoss.UNREACHABLE))
        else:
            stream.tokens(5, 6, finish=FinishReason.STOP)

    harness = RouterHarness(ScriptedTransport(lose))
    await harness.start(prefill_card(1), decode_card(2))
    numbers = count()

    async def send() -> int:
        await read_all(harness, request_id=f"r{next(numbers)}")
        return 200

    async with page_of(harness.telemetry) as address, sending(send):
        prometheus.scrape("kv-lost", address)
        await fires(prometheus, "KvrouterKvLost", "kv-lost")


async def test_a_frontend_without_nats_fires_the_discovery_alert(
    prometheus: Prometheus, own_nats: NatsServer
) -> None:
    environ = {**NATS_TCP_JETSTREAM_SYNC.environ, "NATS_SERVER": own_nats.url}
    async with fleet(environ) as processes:
        frontend = await processes.frontend()
        prometheus.scrape("nats", frontend.url.removeprefix("http://"))
        await until_scraped(prometheus, "nats")
        own_nats.kill()
        await fires(prometheus, "KvrouterDiscoveryDown", "nats")


async def test_a_silent_engine_fires_its_alert(prometheus: Prometheus) -> None:
    async with scripted_engine(VLLM_PAGES) as engine, fleet({"DYN_EVENT_PLANE": "zmq"}) as processes:
        _, frontend = await asyncio.gather(
            processes.worker("--url", engine.url, engine="vllm"), processes.frontend()
        )
        prometheus.scrape("silent", frontend.url.removeprefix("http://"))

        async def is_there() -> bool:
            up = 'kvrouter_worker_up{namespace="silent"} == 1'
            return bool(await asyncio.to_thread(prometheus.query, up))

        await eventually(is_there)
        await engine.stop()
        await fires(prometheus, "KvrouterEngineSilent", "silent")


async def test_a_deployment_with_missing_pods_fires_the_operator_alerts(prometheus: Prometheus) -> None:
    document = deployment(types=("frontend", "decode"))
    graph = cast(Manifest, document.model_dump(mode="json", by_alias=True, exclude_none=True))
    health = ReplicaHealth()
    replica = OperatorInstrumentation(health)
    replica.leads("one")
    controller = Controller(
        AcceptingCluster({DEPLOYMENTS_OF_GRAPHS: [graph]}),
        defaults=DEFAULTS,
        identity="one",
        lease=Key("kvrouter-system", "kvrouter-operator"),
        namespace="",
        instrumentation=replica,
    )
    async with serve_probes("127.0.0.1", 0, health=health, telemetry=replica.telemetry) as port:
        task = asyncio.create_task(controller.run())
        prometheus.scrape("kvrouter-system", f"127.0.0.1:{port}")
        await fires(prometheus, "KvrouterDeploymentNotReady", document.metadata.namespace)
        await fires(prometheus, "KvrouterDeploymentUnavailable", document.metadata.namespace)
        assert prometheus.alertmanager.fired("kvrouter-system") == set()
        replica.follows("one", "the lease could not be renewed")
        await fires(prometheus, "KvrouterOperatorWithoutLeader", "kvrouter-system")
        replica.definition_is("it is another project's")
        await fires(prometheus, "KvrouterDefinitionForeign", "kvrouter-system")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
