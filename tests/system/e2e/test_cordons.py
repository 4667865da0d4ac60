"""A cordon holds at every replica, over restarts of them, and for workers that join later: real processes."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Fleet, Frontend, eventually, fleet, run_kvrouter

STORES = [
    pytest.param({}, id="file"),
    pytest.param({"DYN_DISCOVERY_BACKEND": "nats"}, id="nats"),
]


async def kvrouter(frontend: Frontend, *arguments: str) -> tuple[int, str]:
    """Run a command against a frontend; return its exit code and what it printed."""
    return await run_kvrouter(*arguments, "--url", frontend.url)


async def complete(frontend: Frontend, **more: object) -> tuple[int, str, Mapping[str, Any]]:
    """Return the status, the decode worker and the body of a short completion."""
    body = {"model": "mock", "prompt": words(n=40), "max_tokens": 1, **more}
    answer = await frontend.http.post("/v1/completions", json=body)
    return answer.status_code, answer.headers.get("x-kvrouter-decode-worker", ""), answer.json()


async def cordoned(frontend: Frontend) -> set[str]:
    """The workers that a cordon holds for, by this frontend."""
    workers = (await frontend.fleet())["workers"]
    return {str(worker["worker_id"]) for worker in workers if worker["cordons"]}


async def knows(frontend: Frontend, *workers: str) -> bool:
    return await cordoned(frontend) == {*workers}


async def worker_in(processes: Fleet, zone: str, worker: int, *flags: str) -> None:
    await processes.worker("--worker-id", str(worker), "--domain", f"zone={zone}", *flags)


@pytest.mark.parametrize("environ", STORES)
async def test_a_cordon_holds_at_every_replica_and_after_a_restart(
    environ: dict[str, str], shared_nats: NatsServer
) -> None:
    async with fleet({"NATS_SERVER": shared_nats.url, **environ}) as processes:
        await worker_in(processes, "a", 1)
        await worker_in(processes, "b", 2)
        first, second = await processes.frontend(), await processes.frontend()
        for frontend in (first, second):
            await eventually(lambda here=frontend: here.serves(2))
        code, printed = await kvrouter(first, "cordon", "zone", "a", "--reason", "rack 4")
        assert (code, printed.splitlines()[0]) == (0, "zone a is cordoned (1 worker)")
        await eventually(lambda: knows(second, "1"))
        for frontend in (first, second):
            for _ in range(4):
                assert (await complete(frontend))[:2] == (200, "2")
            status, _, body = await complete(frontend, nvext={"backend_instance_id": 1})
            assert status == 503
            assert body["error"]["refusals"]["cordoned"] == 1
        assert await first.stop() == 0
        third = await processes.frontend()
        await eventually(lambda: third.serves(2))
        assert await knows(third, "1"), "a router knows the cordons before it knows the workers"
        await worker_in(processes, "a", 3)
        for frontend in (second, third):
            await eventually(lambda here=frontend: here.serves(3))
            assert await knows(frontend, "1", "3"), "a worker that joins the zone is cordoned, too"
        assert (await kvrouter(third, "uncordon", "zone", "a"))[0] == 0
        await eventually(lambda: knows(second))
        for worker in (1, 3):
            pinned = await complete(second, nvext={"backend_instance_id": worker})
            assert pinned[:2] == (200, str(worker))
        await second.found_in_log("(?s) cordoned .*rack 4.* uncordoned ")


async def test_drain_waits_for_a_stream_of_another_replica(shared_nats: NatsServer) -> None:
    environ = {"NATS_SERVER": shared_nats.url, "DYN_DISCOVERY_BACKEND": "nats"}
    async with fleet(environ) as processes:
        await worker_in(processes, "a", 1, "--speedup", "1")
        await worker_in(processes, "b", 2, "--speedup", "1")
        first, second = await processes.frontend(), await processes.frontend()
        for frontend in (first, second):
            await eventually(lambda here=frontend: here.serves(2))
        code, printed = await kvrouter(first, "cordon", "node", await node_of(first))
        assert (code, "needs --force" in printed) == (1, True), "both workers are on this host"
        body = {
            "model": "mock",
            "prompt": words(n=40),
            "max_tokens": 5000,
            "stream": True,
            "nvext": {"backend_instance_id": 1},
        }
        async with second.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            draining = asyncio.create_task(kvrouter(first, "drain", "zone", "a"))
            await eventually(lambda: knows(first, "1"))
            await asyncio.wait({draining}, timeout=3.0)
            assert not draining.done(), "the other replica's stream runs there"
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""], "and ends as it would have"
        code, printed = await draining
        assert code == 0, printed
        assert "1 request runs (worker 1: 1)" in printed
        assert printed.endswith("zone a: nothing runs there any more\n")


async def node_of(frontend: Frontend) -> str:
    (node,) = {worker["node"] for worker in (await frontend.fleet())["workers"]}
    assert isinstance(node, str)
    return node
