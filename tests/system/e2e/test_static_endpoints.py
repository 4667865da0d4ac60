"""Workers named by hand: a frontend without discovery, and what it does when they die and come back."""

import pytest

from tests.testing.nats_server import NatsServer
from tests.testing.processes import Fleet, Frontend, Running, eventually, fleet, free_ports

ROUND_ROBIN = ("--router-mode", "round-robin")
NOWHERE = {"DYN_DISCOVERY_BACKEND": "nats", "NATS_SERVER": "nats://127.0.0.1:9"}
"""Discovery that would fail whoever looked there."""


async def complete(frontend: Frontend) -> tuple[int, str]:
    body = {"model": "mock", "prompt": "hello", "max_tokens": 2}
    reply = await frontend.http.post("/v1/completions", json=body)
    return reply.status_code, reply.headers.get("x-kvrouter-decode-worker", "")


async def is_ready(frontend: Frontend) -> bool:
    return (await frontend.http.get("/ready")).status_code == 200


async def static_worker(processes: Fleet, worker_id: int, *flags: str, **environ: str) -> tuple[str, Running]:
    """Start one; return what its log says to write at the frontend."""
    started = await processes.worker(
        "--worker-id", str(worker_id), "--static", "--speedup", "20", *flags, environ=environ
    )
    return started.ready["address"], started


@pytest.mark.parametrize("plane", ["tcp", "http", "nats"])
async def test_static_endpoints_are_served_in_turn_without_discovery(
    plane: str, shared_nats: NatsServer
) -> None:
    environ = {**NOWHERE, "DYN_REQUEST_PLANE": plane}
    if plane == "nats":
        environ["NATS_SERVER"] = shared_nats.url
    async with fleet(environ) as processes:
        (one, _), (two, _) = await static_worker(processes, 1), await static_worker(processes, 2)
        assert one.startswith(f"{plane}://")
        assert one.endswith("/1/0,model=mock,tokenizer=mock")
        frontend = await processes.frontend(*ROUND_ROBIN, "--static-endpoint", one, "--static-endpoint", two)
        await eventually(lambda: is_ready(frontend))
        answers = [await complete(frontend) for _ in range(4)]
        assert {status for status, _ in answers} == {200}
        assert [worker for _, worker in answers[:2]] == [worker for _, worker in answers[2:]]
        assert {worker for _, worker in answers} == {"1", "2"}


async def test_a_dead_static_worker_is_skipped_until_it_is_back() -> None:
    port = str(free_ports())
    async with fleet(NOWHERE) as processes:
        one, first = await static_worker(processes, 1, "--listen-port", port)
        two, _ = await static_worker(processes, 2)
        frontend = await processes.frontend(*ROUND_ROBIN, "--static-endpoint", one, "--static-endpoint", two)
        await eventually(lambda: is_ready(frontend))

        async def alive() -> dict[int, bool]:
            return {each["worker_id"]: each["alive"] for each in (await frontend.fleet())["workers"]}

        async def is_one(value: bool) -> bool:
            return (await alive())[1] is value

        await first.kill()
        await eventually(lambda: is_one(False))
        assert [await complete(frontend) for _ in range(3)] == [(200, "2")] * 3
        again, _ = await static_worker(processes, 1, "--listen-port", port)
        assert again == one
        await eventually(lambda: is_one(True))
        assert {await complete(frontend) for _ in range(4)} == {(200, "1"), (200, "2")}


async def test_a_static_pair_hands_over_kv() -> None:
    async with fleet(NOWHERE) as processes:
        prefill, _ = await static_worker(processes, 1, "--role", "prefill")
        decode, _ = await static_worker(processes, 2, "--role", "decode")
        assert "bootstrap=" in prefill
        frontend = await processes.frontend(
            *ROUND_ROBIN, "--static-endpoint", prefill, "--static-endpoint", decode
        )
        await eventually(lambda: is_ready(frontend))
        assert await complete(frontend) == (200, "2")
