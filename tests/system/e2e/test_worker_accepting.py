"""A worker process tells whether it takes requests: not before its place is known, nor while it drains."""

import asyncio
import signal
from functools import partial
from pathlib import Path

import httpx

from tests.testing.processes import eventually, fleet, free_ports
from tests.testing.streaming_client import StreamingClient


async def test_a_worker_accepts_from_its_announcement_until_its_drain(tmp_path: Path) -> None:
    port = free_ports(1)
    topology = {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path),
        "DYN_KV_TRANSFER_DOMAIN": "zone",
        "DYN_TOPOLOGY_POLL_S": "0.05",
    }
    async with (
        fleet() as processes,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http,
    ):

        async def tells(status: str, code: int) -> bool:
            try:
                accepts = await http.get("/accepting")
                answers = await http.get("/health")
            except httpx.TransportError:
                return False
            found = (accepts.json()["status"], accepts.status_code, answers.status_code)
            return found == (status, code, 200)

        async def starts() -> bool:
            return await tells("starting", 503)

        async def drains() -> bool:
            return await tells("draining", 503)

        starting = asyncio.create_task(processes.worker("--health-port", str(port), environ=topology))
        await eventually(starts)
        (tmp_path / "zone").write_text("a")
        worker = await starting
        assert await tells("ok", 200)
        frontend = await processes.frontend()
        await eventually(partial(frontend.serves, 1))
        client = StreamingClient(frontend, max_tokens=5_000)
        await client.until(pieces=1)
        worker.process.send_signal(signal.SIGTERM)
        await eventually(drains)
        assert not client.has_ended
        await worker.kill()
        await client.end()
