"""``kvrouter doctor`` as an operator runs it, on a fleet of processes, before and after it breaks."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import Any

from tests.testing.mock_server import words
from tests.testing.processes import CLI, Fleet, Frontend, Running, eventually, fleet

FLEET = """
version: 1
models: [{{name: mock, block_size: {block_size}}}]
topology: {{levels: [zone]}}
workers: [{{name: w, replicas: 3, domains: {{zone: a}}}}]
"""


UNTIMED = {"KVROUTER_ROUTER_COST": "blocks"}
"""A busy machine makes ranks slow, which is no fault of the fleet."""


async def doctor(processes: Fleet, *arguments: str) -> tuple[int | None, Any, str]:
    """The exit code, the report, and what was written on standard error."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLI, "doctor", "--output", "json", *arguments),
        env=processes.environ,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await running.communicate()
    return running.returncode, json.loads(out) if out else None, err.decode()


async def worker(processes: Fleet, index: int, *, block_size: int = 16) -> Running:
    file = processes.folder / f"fleet-{block_size}.yaml"
    file.write_text(FLEET.format(block_size=block_size))
    return await processes.worker("--fleet", str(file), "--group", "w", "--index", str(index))


async def heard_and_served(frontend: Frontend) -> bool:
    """Whether both workers answered, and their clocks are known."""
    if not await frontend.serves(2):
        return False
    for each in (await frontend.fleet())["workers"]:
        pin = {"backend_instance_id": each["worker_id"]}
        body = {"model": "mock", "prompt": words(n=100), "max_tokens": 2, "nvext": pin}
        (await frontend.http.post("/v1/completions", json=body)).raise_for_status()
    ranks = [rank for each in (await frontend.fleet())["workers"] for rank in each["ranks"]]
    return all(rank["index_blocks"] and rank["feed"]["clock_ahead_s"] is not None for rank in ranks)


async def test_doctor_examines_a_process_fleet_before_and_after_it_breaks() -> None:
    lease = {"KVROUTER_LEASE_S": "600"}  # who is silent does not leave meanwhile
    async with fleet({**lease, **UNTIMED}) as processes:
        frontend, first, _ = await asyncio.gather(
            processes.frontend(), worker(processes, 0), worker(processes, 1)
        )
        await eventually(lambda: heard_and_served(frontend))
        code, report, err = await doctor(processes, "--url", frontend.url)
        assert (code, report["findings"], err) == (0, [], "")
        assert {"clocks", "versions", "feeds", "block-sizes"} <= {each["check"] for each in report["passed"]}

        await worker(processes, 2, block_size=32)
        first.pause()

        async def is_broken() -> bool:
            shown = await frontend.fleet()
            return bool(shown["refused_workers"]) and not all(each["alive"] for each in shown["workers"])

        await eventually(is_broken)
        code, report, _ = await doctor(processes, "--url", frontend.url)
        assert code == 1
        found = {(each["check"], each["severity"]) for each in report["findings"]}
        broken = {("answering", "critical"), ("block-sizes", "critical")}
        assert broken <= found <= {*broken, ("feeds", "warning")}  # once its heartbeats are missed, too
        first.resume()
        await frontend.stop()
        code, report, err = await doctor(processes, "--url", frontend.url, "--timeout-s", "5")
        assert (code, report) == (2, None)
        assert f"kvrouter: {frontend.url}: no answer" in err


async def test_doctor_examines_a_standalone_router() -> None:
    async with fleet(UNTIMED) as processes:
        router, _ = await asyncio.gather(processes.router(), processes.worker())
        await eventually(lambda: router.serves(1))
        code, report, _ = await doctor(processes, "--url", router.url)
    assert (code, report["findings"]) == (0, [])
