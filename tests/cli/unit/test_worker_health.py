"""What a worker's health pages say, and when they cannot be had."""

import asyncio
import socket
from contextlib import suppress

import httpx
import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.cli.worker.worker_process import WorkerHealth, health_of, health_pages
from kvrouter.core.errors import ConfigError
from kvrouter.settings.planes import PlaneSettings
from tests.testing.processes import free_ports
from tests.testing.router_harness import card
from tests.testing.waits import LIMIT_S


@pytest.mark.parametrize(
    ("reported", "health"),
    [
        ({}, WorkerHealth.OK),
        ({"draining": True}, WorkerHealth.DRAINING),
        ({"engine_silent": True}, WorkerHealth.ENGINE_SILENT),
        ({"engine_silent": True, "draining": True}, WorkerHealth.DRAINING),
    ],
)
def test_worker_health_follows_from_its_card(reported: dict[str, bool], health: WorkerHealth) -> None:
    assert health_of(replace(card(1), **reported)) is health


def test_worker_without_a_card_is_starting() -> None:
    assert health_of(None) is WorkerHealth.STARTING


async def test_health_page_always_answers_and_accepting_only_when_ok() -> None:
    now = WorkerHealth.STARTING
    planes = PlaneSettings(health_port=free_ports(1))
    async with (
        health_pages(planes, lambda: now),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{planes.health_port}", timeout=60.0) as http,
    ):
        for now in WorkerHealth:
            answers, accepts = await http.get("/health"), await http.get("/accepting")
            assert answers.status_code == 200
            assert accepts.status_code == (200 if now is WorkerHealth.OK else 503)
            assert answers.json() == accepts.json() == {"status": now.value}


async def test_health_page_names_engines_without_a_worker() -> None:
    waits = ExpectedEngine(engine_url="http://gpu-7:8000", state="awaited", reason="connection refused")
    planes = PlaneSettings(health_port=free_ports(1))
    async with (
        health_pages(planes, lambda: WorkerHealth.OK, lambda: [waits, ExpectedEngine(state="joined")]),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{planes.health_port}", timeout=60.0) as http,
    ):
        for path in ("/health", "/accepting"):
            assert (await http.get(path)).json() == {"status": "ok", "engine_problems": [to_builtins(waits)]}


async def test_taken_health_port_is_reported_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        planes = PlaneSettings(health_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="--health-port") as refused:
            async with health_pages(planes, lambda: WorkerHealth.OK):
                pass
    assert refused.value.param == "health_port"


async def test_idle_health_connections_make_room_for_requests() -> None:
    planes = PlaneSettings(health_port=free_ports(1), hello_connections_max=8)
    async with health_pages(planes, lambda: WorkerHealth.OK):
        silent = [await asyncio.open_connection("127.0.0.1", planes.health_port) for _ in range(20)]
        dropped = [reader for reader, _ in silent[:12]]
        for reader in dropped:
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{planes.health_port}", timeout=60.0) as http:
            assert (await http.get("/health")).status_code == 200
        for _, writer in silent:
            writer.transport.abort()
