"""What probes of the operator tell: what a replica waits for, and that a part of it has ended."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from kvrouter.operator.instrumentation import ReplicaHealth
from kvrouter.operator.servers import serve_probes
from kvrouter.telemetry import OperatorTelemetry


@pytest.fixture
def health() -> ReplicaHealth:
    return ReplicaHealth()


@pytest_asyncio.fixture
async def http(health: ReplicaHealth) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_probes("127.0.0.1", 0, health=health, telemetry=OperatorTelemetry()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
    ):
        yield client


async def test_replica_is_ready_once_every_awaited_part_has_been_there(
    health: ReplicaHealth, http: httpx.AsyncClient
) -> None:
    assert await reported(http, "/readyz") == (200, "ok\n")
    health.waits_for("the API server", "it has not answered yet")
    health.waits_for("admission", "it does not listen yet")
    health.waits_still("the API server", "no route to host")
    assert await reported(http, "/readyz") == (
        503,
        "the API server: no route to host; admission: it does not listen yet\n",
    )
    assert await reported(http, "/healthz") == (200, "ok\n")
    health.has("the API server")
    health.has("admission")
    health.waits_still("the API server", "it went away again")
    assert await reported(http, "/readyz") == (200, "ok\n")


async def test_healthz_fails_when_a_needed_part_has_ended(
    health: ReplicaHealth, http: httpx.AsyncClient
) -> None:
    ends = asyncio.Event()

    async def part() -> None:
        await ends.wait()

    task = asyncio.create_task(part())
    health.needs("the lease's renewal", task)
    assert await reported(http, "/healthz") == (200, "ok\n")
    ends.set()
    await task
    assert await reported(http, "/healthz") == (503, "the lease's renewal has ended\n")
    assert await reported(http, "/readyz") == (200, "ok\n")


async def reported(http: httpx.AsyncClient, path: str) -> tuple[int, str]:
    answer = await http.get(path)
    return answer.status_code, answer.text
