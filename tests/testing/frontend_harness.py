"""The frontend's HTTP application on a real socket, before scripted workers."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.frontend.engine_tokens import ModelTexts
from kvrouter.frontend.http_app import FrontendApp
from kvrouter.frontend.public_pages import SETTLE_S
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings
from kvrouter.text.model import TextModel
from kvrouter.transports.requests.port import RequestTransport
from tests.testing.router_harness import MODEL, RouterHarness, decode_card, prefill_card
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport

CONTEXT_TOKENS = 512


@cache
def mock_text() -> TextModel:
    """The mock model's tokenizer and template; read once a process."""
    return TextModel.load_mock(context_length_tokens=CONTEXT_TOKENS)


def token_ids(text: str) -> tuple[int, ...]:
    return tuple(mock_text().tokenizer.encode(text))


def text_answer(
    *texts: str, finish: FinishReason = FinishReason.STOP, cached: int | None = None
) -> Callable[[ScriptedStream], None]:
    """A worker that answers with these texts, a chunk each, and then ends."""

    def script(stream: ScriptedStream) -> None:
        for text in texts:
            stream.feed(EngineChunk(token_ids=token_ids(text), cached_tokens=cached))
        stream.feed(EngineChunk(finish=finish))

    return script


@dataclass(frozen=True, slots=True)
class FrontendHarness:
    """What a test of the frontend holds."""

    harness: RouterHarness
    plane: ScriptedTransport
    door: FrontendApp
    http: httpx.AsyncClient
    address: tuple[str, int]

    async def chat(
        self, content: str = "hello", *, fields: Mapping[str, object] | None = None, **more: object
    ) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **(fields or {}), **more}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: object = "hello", **more: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **more})


@asynccontextmanager
async def running_frontend(
    *cards: WorkerCard,
    script: Callable[[ScriptedStream], None] | None = None,
    plane: RequestTransport | None = None,
    config: KvRouterConfig | None = None,
    settings: FrontendSettings | None = None,
    settle_s: float = SETTLE_S,
    text: TextModel | None = None,
    place: Mapping[str, str] | None = None,
    sync: ReplicaSync | None = None,
    traffic: TrafficRecorder | None = None,
) -> AsyncIterator[FrontendHarness]:
    """A started front door on a free port; drained at the end. ``plane`` replaces the scripted one; ``place``
    are the frontend's own domains.
    """
    scripted = ScriptedTransport(script)
    harness = RouterHarness(plane or scripted, config, place=place, sync=sync, traffic=traffic)
    await harness.start(*cards)
    door = FrontendApp(
        harness.service,
        ModelTexts({MODEL: text or mock_text()}),
        settings=settings or FrontendSettings(),
        telemetry=harness.telemetry,
        settle_s=settle_s,
    )
    server = door.server(connections_max=100, descriptors_max=2**20, refused_max=64)
    await server.serve()
    try:
        host, port = server.addresses[0]
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60.0) as client:
            yield FrontendHarness(harness, scripted, door, client, (host, port))
    finally:
        await server.drain(0.0)
        door.close()
        harness.service.stop()


SECRET = {"model": MODEL, "messages": [{"role": "user", "content": "a secret prompt"}]}
"""A chat whose words may be nowhere but in its answer."""


def error_of(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error, dict)
    return error


def handoff_script(worker: ScriptedStream) -> None:
    """A prefill worker that hands over, a decode worker that says ok."""
    if worker.request.leg is Leg.PREFILL:
        worker.feed(EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 1}))
    else:
        text_answer("ok")(worker)


def zoned_cards() -> list[WorkerCard]:
    """A prefill worker whose KV must stay in its zone, and a decode worker in it and in another one."""
    return [prefill_card(1), decode_card(2), decode_card(3, zone="b")]


async def metrics_of(frontend: FrontendHarness) -> dict[tuple[str, ...], float]:
    """Samples by name and sorted label values."""
    response = await frontend.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
