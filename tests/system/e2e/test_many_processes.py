"""Frontends and workers as processes: with no broker, over NATS, and all of it with one command."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import (
    ENDS_WITHIN_S,
    READY_WITHIN_S,
    Frontend,
    eventually,
    fleet,
    free_ports,
    run_kvrouter,
)

PROMPT = words(n=200)
PLANES = [
    pytest.param({}, (), id="file-tcp-zmq"),
    pytest.param({"DYN_REQUEST_PLANE": "http", "KVROUTER_PLANE_TOKEN": "s"}, (), id="file-http-zmq"),
    pytest.param({"DYN_DISCOVERY_BACKEND": "nats"}, (), id="nats-tcp-jetstream"),
    pytest.param(
        {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "nats", "KVROUTER_PLANE_TOKEN": "s"},
        ("--enable-local-indexer",),
        id="nats-nats-core",
    ),
]


async def answer(frontend: Frontend) -> tuple[str, int]:
    body = {"model": "mock", "prompt": PROMPT, "max_tokens": 16}
    reply = (await frontend.http.post("/v1/completions", json=body)).raise_for_status().json()
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


async def is_ready(frontend: Frontend) -> bool:
    return (await frontend.http.get("/ready")).status_code == 200


async def all_answer(frontend: Frontend) -> bool:
    return all(worker["alive"] for worker in (await frontend.fleet())["workers"])


async def has_cached(frontend: Frontend) -> bool:
    page = await frontend.fleet()
    return any(rank["index_blocks"] for worker in page["workers"] for rank in worker["ranks"])


@pytest.mark.parametrize(("environ", "flags"), PLANES)
async def test_a_fleet_of_processes_is_served_by_every_frontend(
    environ: dict[str, str], flags: tuple[str, ...], shared_nats: NatsServer
) -> None:
    async with fleet({"NATS_SERVER": shared_nats.url, **environ}) as processes:
        zone = ("--domain", "zone=a", "--kv-transfer-domain", "zone", "--speedup", "20", *flags)
        prefill = await processes.worker("--role", "prefill", *zone)
        decode = await processes.worker("--role", "decode", *zone)
        first, second = await processes.frontend(), await processes.frontend()
        for frontend in (first, second):
            await eventually(lambda here=frontend: is_ready(here))
        text, cached_tokens = await answer(first)
        assert cached_tokens == 0
        await eventually(lambda: has_cached(second))
        await eventually(lambda: all_answer(second))
        assert await answer(second) == (text, 192)
        assert (await second.metrics()).total("handoffs_total", prefill_domain="a", decode_domain="a") == 1
        assert await decode.stop() == 0
        refused = await first.http.post("/v1/completions", json={"model": "mock", "prompt": "x"})
        assert refused.status_code == 503
        assert [await first.stop(), await second.stop(), await prefill.stop()] == [0, 0, 0]


async def test_a_worker_without_its_topology_place_exits_with_1(tmp_path: Path) -> None:
    async with fleet() as processes:
        environ = {
            "DYN_TOPOLOGY_ENABLED": "true",
            "DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path),
            "DYN_KV_TRANSFER_DOMAIN": "zone",
            "DYN_TOPOLOGY_TIMEOUT_S": "0.1",
            "DYN_TOPOLOGY_POLL_S": "0.05",
        }
        code, printed = await run_kvrouter("worker", "mock", environ={**processes.environ, **environ})
        assert (code, f"{tmp_path}" in printed) == (1, True)


async def test_a_missing_nats_server_is_one_line_and_exit_code_1() -> None:
    async with fleet({"DYN_DISCOVERY_BACKEND": "nats", "NATS_SERVER": "nats://me:hidden@127.0.0.1:1"}) as it:
        code, printed = await run_kvrouter("frontend", "--http-port", "0", environ=it.environ)
        assert code == 1
        assert printed.splitlines()[-1].startswith("kvrouter: no NATS server lets us in at 127.0.0.1:1 ")
        assert "hidden" not in printed


@pytest.mark.parametrize("with_nats", [False, True])
async def test_up_with_replicas_runs_the_whole_fleet(
    with_nats: bool, shared_nats: NatsServer, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("version: 1\nmodels: [{name: mock}]\nworkers: [{name: w, replicas: 2}]\nspeedup: 20\n")
    async with fleet({"NATS_SERVER": shared_nats.url}) as processes:
        arguments = ("--fleet", str(file), "--replicas", "2", "--http-port", str(free_ports()))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.cli", "up", *arguments, *(("--nats",) if with_nats else ())),
            env=processes.environ,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            ports: list[str] = []
            async with asyncio.timeout(READY_WITHIN_S):
                while len(ports) < 2:
                    line = (await process.stderr.readline()).decode()
                    assert line, "it ended"
                    if " ready " in line and "|" not in line:
                        ports += re.findall(r"port=(\d+)", line)
            reading = asyncio.create_task(process.stderr.read())
            texts = set()
            for port in ports:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
                    body = {"model": "mock", "prompt": PROMPT, "max_tokens": 8}
                    reply = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                    texts.add(reply["choices"][0]["text"])
            assert len(texts) == 1
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(ENDS_WITHIN_S):
                assert await process.wait() == 0
                assert b"Traceback" not in await reading
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
