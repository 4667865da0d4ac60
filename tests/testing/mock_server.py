"""``kvrouter up`` inside a test: a fleet of mock engines behind a real socket, and OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.cli.up.run import Embedded, embedded
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings, Settings
from kvrouter.text.model import FIRST_WORD_ID, mock_words
from tests.testing.mock_fleet import LONG_TOKENS
from tests.testing.waits import until

MODEL = "mock"
TIMEOUT_S = 30.0
"""Only a test that fails waits as long as this."""


def words(*, first: int = 0, n: int = 40) -> str:
    """A text of exactly ``n`` tokens of the mock model."""
    known = mock_words()
    return "".join(f" {known[(first * 101 + at) % len(known)]}" for at in range(n))


def word_ids(*, first: int = 0, n: int = 40) -> list[int]:
    """The tokens of :func:`words`."""
    return [FIRST_WORD_ID + (first * 101 + at) % len(mock_words()) for at in range(n)]


def user(content: str) -> list[ChatCompletionUserMessageParam]:
    return [{"role": "user", "content": content}]


class Metrics:
    """One scrape of ``/metrics``."""

    def __init__(self, page: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def value(self, metric: str, **labels: str) -> float:
        """The sum of the samples that carry these labels."""
        found = self._samples.get(f"kvrouter_{metric}", [])
        return sum(value for carried, value in found if labels.items() <= carried.items())

    def bounds(self, histogram: str) -> list[str]:
        """The upper bounds of a histogram's buckets, in order."""
        labels = (carried["le"] for carried, _ in self._samples.get(f"kvrouter_{histogram}_bucket", ()))
        return sorted(set(labels), key=float)


@dataclass(frozen=True, slots=True)
class MockServer:
    """What a test of the whole system holds."""

    system: Embedded
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        host, port = self.system.address
        return f"http://{host}:{port}"

    async def metrics(self) -> Metrics:
        response = await self.http.get("/metrics")
        assert response.status_code == 200
        return Metrics(response.text)

    async def until_quiet(self) -> None:
        """Return once nothing runs; then nothing may be left over anywhere."""
        system = self.system
        await until(lambda: system.fleet.cluster.idle and not system.service.requests.running)
        assert system.fleet.check_integrity() == []
        for model in system.service.models():
            assert len(model.ledger) == 0

    async def kill(self, worker_id: str | int) -> None:
        await self.system.fleet.kill(WorkerId(int(worker_id)))

    async def resume(self, headers: Mapping[str, str] | None = None) -> dict[str, object]:
        """Stream an answer whose decode worker is lost after its first piece, so that another one ends it;
        return the body.
        """
        body = {"model": MODEL, "prompt": words(), "max_tokens": LONG_TOKENS, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await self.kill(response.headers["x-kvrouter-decode-worker"])
            assert [line async for line in lines if "[DONE]" in line]
        return body


@asynccontextmanager
async def mock_server(
    fleet: FleetFile,
    *,
    router: KvRouterConfig | None = None,
    frontend: FrontendSettings | None = None,
    recording: RecordingSettings | None = None,
) -> AsyncIterator[MockServer]:
    """The whole system on a free port; at the end of a test that passes nothing may be left over."""
    front = (frontend or FrontendSettings()).model_copy(update={"http_port": 0})
    settings = Settings(
        router=router or fleet.router, frontend=front, recording=recording or RecordingSettings()
    )
    async with embedded(settings, fleet) as system:
        host, port = system.address
        url = f"http://{host}:{port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
            ) as client,
        ):
            here = MockServer(system, client, http)
            yield here
            await here.until_quiet()


def leave_recovery_unanswered(monkeypatch: pytest.MonkeyPatch, here: MockServer) -> None:
    """Let no worker of this system answer a router that asks for all of its blocks."""

    async def is_asked(_rank: WorkerRank) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(here.system.fleet.events, "recover_snapshot", is_asked)
