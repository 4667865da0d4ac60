"""Bodies that would become a hundred times their size: refused while others are served, and nothing is built.

A body is received and scanned: what it may hold next to its own length is for what the scan leaves to others.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from tests.system.hostile.bodies import CHAT, LONG_BODY_BYTES, blank_bodies, filled, refused_bodies, said
from tests.system.hostile.bystanders import Bystanders
from tests.system.hostile.meter import MIB, Meter
from tests.testing.processes import Frontend, eventually, fleet

JSON = {"content-type": "application/json"}
BODY_BYTES = 20_000_000
LOOP_CPU_MAX_S_PER_MB = 0.02
"""Of the event loop. A quiet machine needs 0.003; to build the values took 0.1 to 0.4."""

CPU_MAX, BLANKS_CPU_MAX = 8.0, 4.0
"""Of all threads, in the CPU time of receiving as much: 0.0004 s a megabyte on a quiet machine, more on a
busy one. A scan to the end takes up to 5 times that; blanks up to 3, where decoders took 4.5 to 9."""

ROUNDS = 5
"""Of them the cheapest counts: other work on the machine makes some dearer."""

MEMORY_MAX = 1.5
"""The most that is held for a body, in its own length, next to KEPT_BYTES: it is received without a copy."""

KEPT_BYTES = 8 * MIB


async def test_a_refused_body_costs_little_loop_time_and_memory() -> None:
    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        async with Bystanders(frontend):
            for kind, (path, body, param) in refused_bodies(BODY_BYTES).items():
                cpu_s, held = await cost_of(frontend, path, body, param, kind)
                assert cpu_s < LOOP_CPU_MAX_S_PER_MB * len(body) / 1e6, (kind, cpu_s)
                assert held < MEMORY_MAX, (kind, held)


async def test_a_refused_body_costs_little_cpu_over_all_threads() -> None:
    """With nobody else there, whose CPU time would count."""
    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        await eventually(partial(frontend.serves, 1))
        meter = Meter(frontend.pid)

        async def cpu_of(kind: str, path: str, body: bytes) -> float:
            rounds_s = []
            for _ in range(ROUNDS):
                before_s = meter.cpu_s()
                reply = await frontend.http.post(path, content=body, headers=JSON)
                assert reply.status_code in (400, 404), (kind, reply.status_code, reply.text)
                rounds_s.append(meter.cpu_s() - before_s)
            return min(rounds_s)

        received_s = await cpu_of("no JSON", "/v1/completions", b"x" * BODY_BYTES)
        blanks = set(blank_bodies(0))  # their names, of the smallest bodies
        for kind, (path, body, _) in refused_bodies(BODY_BYTES).items():
            most = BLANKS_CPU_MAX if kind in blanks else CPU_MAX
            most_s = most * received_s * len(body) / BODY_BYTES
            cpu_s = await cpu_of(kind, path, body)
            assert cpu_s < most_s, (kind, cpu_s, most_s)


@pytest.mark.parametrize("item", [b"\r\n\r\n", b"a\r\n\r\n", b"0\r\n\r\n"])
async def test_a_chunk_of_blank_lines_costs_little_loop_time(item: bytes) -> None:
    body = filled(b'{"model":"mock","messages":[', item, b"1]}", size_bytes=BODY_BYTES)

    async def one_chunk() -> AsyncIterator[bytes]:
        yield body

    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        async with Bystanders(frontend):
            meter = Meter(frontend.pid)
            before_s = meter.loop_cpu_s()
            reply = await frontend.http.post(CHAT, content=one_chunk())
            assert reply.status_code == 400, reply.text
            cpu_s = meter.loop_cpu_s() - before_s
            assert cpu_s < LOOP_CPU_MAX_S_PER_MB * len(body) / 1e6, (item, cpu_s)


@pytest.mark.parametrize("command", ["frontend", "router"])
async def test_a_body_longer_than_any_prompt_is_refused_unread(command: str) -> None:
    """With settings as they come: the mock model's context needs a few megabytes."""
    path = CHAT if command == "frontend" else "/v1/route"
    async with fleet() as here:
        await here.worker()
        door = await here.door(command)
        await eventually(partial(knows_a_worker, door))
        meter = Meter(door.pid)
        meter.forget_peak()
        before_bytes = meter.resident_bytes()
        body = said(b"a", b'"}]}', size_bytes=LONG_BODY_BYTES)
        reply = await door.http.post(path, content=body, headers=JSON)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert "KVROUTER_BODY_MAX_BYTES" in reply.text
        assert meter.peak_bytes() - before_bytes < len(body) / 2


async def knows_a_worker(door: Frontend) -> bool:
    return (await door.http.get("/ready")).status_code == 200


async def cost_of(
    frontend: Frontend, path: str, body: bytes, param: str | None, kind: str
) -> tuple[float, float]:
    """CPU time of the event loop, in seconds, and memory, in lengths of the body, that its refusal takes."""
    meter = Meter(frontend.pid)
    before_s, before_bytes = meter.loop_cpu_s(), meter.resident_bytes()
    meter.forget_peak()
    reply = await frontend.http.post(path, content=body, headers=JSON)
    assert reply.status_code in (400, 404), (kind, reply.status_code, reply.text)
    assert len(reply.content) < 2_000
    if param is not None:
        assert reply.json()["error"]["param"] == param, (kind, reply.text)
    await asyncio.sleep(0)
    held = (meter.peak_bytes() - before_bytes - KEPT_BYTES) / len(body)
    return meter.loop_cpu_s() - before_s, held
