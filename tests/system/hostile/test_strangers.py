"""Whoever has no token opens connections and says nothing: frontends reach their workers all the same."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from kvrouter.app.lifetime import allow_many_files
from tests.system.hostile.meter import Meter
from tests.testing.mock_server import words
from tests.testing.processes import Frontend, Running, eventually, fleet, free_ports

STRANGERS = 1_100
AGAIN_AFTER_S = 5.0
CPU_MAX = 0.5
"""Of one core for the worker while they come and go: 0.04 were seen on a busy machine, of all its threads."""

BODY = {"model": "mock", "prompt": words(n=70), "max_tokens": 2}


class Crowd:
    """Silent connections to one port, all of them opened again every few seconds."""

    def __init__(self, port: int) -> None:
        self.rounds = 0
        self._port = port
        self._open: list[socket.socket] = []

    async def stay(self) -> None:
        """Go on until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            self.leave()
            for _ in range(STRANGERS):
                stranger = socket.socket()
                stranger.setblocking(False)
                with suppress(BlockingIOError):
                    stranger.connect(("127.0.0.1", self._port))
                self._open.append(stranger)
                await asyncio.sleep(0)
            self.rounds += 1
            await asyncio.sleep(began_s + AGAIN_AFTER_S - loop.time())

    def leave(self) -> None:
        for stranger in self._open:
            stranger.close()
        self._open.clear()


@asynccontextmanager
async def crowd_at(port: int) -> AsyncIterator[Crowd]:
    """Strangers stand before the port; they are all there, and stay until the end."""
    crowd = Crowd(port)
    staying = asyncio.create_task(crowd.stay())
    try:
        async with asyncio.timeout(60.0):
            while not crowd.rounds:
                assert not staying.done(), staying
                await asyncio.sleep(0.01)
        yield crowd
        assert not staying.done(), staying
    finally:
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
        crowd.leave()


def port_of(worker: Running) -> int:
    return int(worker.ready["address"].split("/")[2].rpartition(":")[2])


async def is_served(frontend: Frontend) -> bool:
    return (await frontend.http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("request_plane", ["tcp", "http"])
async def test_a_new_frontend_reaches_a_worker_crowded_by_strangers(request_plane: str) -> None:
    allow_many_files()
    planes = {
        "KVROUTER_PLANE_TOKEN": "a token",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_REQUEST_PLANE": request_plane,
        "KVROUTER_HELLO_WITHIN_S": "600",  # no deadline ends a stranger: the oldest must make room
    }
    async with fleet(planes) as processes:
        worker = await processes.worker("--worker-id", "1")
        loop = asyncio.get_running_loop()
        meter = Meter(worker.pid)
        came_s, before_s = loop.time(), meter.loop_cpu_s()
        async with crowd_at(port_of(worker)) as crowd:
            frontend = await processes.frontend()
            await eventually(lambda: is_served(frontend))
            n_rounds = crowd.rounds
            while crowd.rounds < n_rounds + 1:  # they come again, and take nobody's place
                assert await is_served(frontend)
                await asyncio.sleep(0.1)
            assert meter.loop_cpu_s() - before_s < CPU_MAX * (loop.time() - came_s)
        await worker.has_logged("have not said who they are")
        n_logged = worker.lines().count("have not said who they are")
        assert 1 <= n_logged <= 1 + (loop.time() - came_s) / 60.0, "logged once a minute"


async def test_kv_events_and_health_work_despite_crowds_of_strangers() -> None:
    allow_many_files()
    port, health_port = free_ports(3), free_ports(1)
    planes = {"KVROUTER_PLANE_TOKEN": "a token", "DYN_EVENT_PLANE": "zmq"}
    async with fleet(planes) as processes:
        worker = await processes.worker(
            *("--worker-id", "1", "--listen-port", str(port), "--health-port", str(health_port))
        )
        loop, meter = asyncio.get_running_loop(), Meter(worker.pid)
        came_s, before_s = loop.time(), meter.cpu_s()
        async with crowd_at(port + 1), crowd_at(port + 2), crowd_at(health_port):
            frontend = await processes.frontend()
            await eventually(lambda: is_served(frontend))

            async def is_heard() -> bool:
                (worker,) = (await frontend.fleet())["workers"]
                rank = worker["ranks"][0]
                return (rank["feed"]["state"], rank["index_blocks"]) == ("live", 1)

            await eventually(is_heard)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{health_port}", timeout=60.0) as http:
                for path in ("/health", "/accepting"):
                    assert (await http.get(path)).status_code == 200
            assert meter.cpu_s() - before_s < CPU_MAX * (loop.time() - came_s)
