"""An hour of everything at once: ordinary load, hostile clients, and workers that die and come back.

The processes run with the fault handler and the debug allocators, which find memory that is written after it
was freed, or beyond its end; ``make test-nightly`` builds the native module with its assertions too.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from tests.system.hostile.meter import MIB, Meter
from tests.testing.fleet_processes import NATS_TCP_JETSTREAM_SYNC, FleetProcesses, fleet_processes
from tests.testing.load_generator import LoadGenerator
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend

LASTS_S = float(os.environ.get("NIGHTLY_LOAD_S", "3600"))
WARM_SHARE = 0.2
"""After so much of the time a process holds what it will hold."""

GROWTH_MAX_BYTES = 64 * MIB
KILL_EVERY_S = 20.0
AT_ONCE = 12
REST_S = 0.2
CHECKED = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONMALLOC": "debug",
    "MALLOC_CHECK_": "3",
    "MALLOC_PERTURB_": "165",
    "RUST_BACKTRACE": "1",
}
FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
topology: {levels: [zone], links: {within: {zone: {latency_s: 0.02, bandwidth_bytes_per_s: 1.0e+11}}}}
kv_transfer: {domain: zone, enforcement: required}
speedup: 20
workers:
  - {name: prefill, role: prefill, replicas: 2, domains: {zone: a}, engine: &engine {
      kv_wait_expiry_s: 2, total_kv_blocks: 512}}
  - {name: decode, role: decode, replicas: 2, domains: {zone: a}, engine: *engine}
"""


async def test_an_hour_of_mixed_load_gives_correct_answers_and_no_growth(
    shared_nats: NatsServer, record_property: Callable[[str, object], None]
) -> None:
    async with fleet_processes(FLEET, NATS_TCP_JETSTREAM_SYNC, shared_nats, environ=CHECKED) as here:
        load = LoadGenerator(here.frontends, at_once=AT_ONCE)
        over = asyncio.Event()
        hostile: Counter[str] = Counter()
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(load.ask(10**9))
            group.create_task(_churn(here, over))
            for frontend in here.frontends:
                group.create_task(_hostile(frontend, hostile, over))
            await asyncio.sleep(LASTS_S * WARM_SHARE)
            before = [Meter(each.pid).resident_bytes() for each in here.frontends]
            await asyncio.sleep(LASTS_S * (1 - WARM_SHARE))
            over.set()
            load.stop()
            await loading
        grown = [
            Meter(each.pid).resident_bytes() - was for each, was in zip(here.frontends, before, strict=True)
        ]
        answers = load.answers
        print(
            f"{time.monotonic() - began_s:.0f} s: {answers.whole} whole answers, {answers.wrong} wrong, "
            f"failed {dict(answers.errors)}, hostile {dict(hostile)}, frontends grown by {grown} bytes"
        )
        assert all(each.is_running for each in here.frontends)
        assert answers.wrong == 0
        assert answers.errors == Counter()
        assert max(grown) < GROWTH_MAX_BYTES
        await here.is_well(answers.prompts)


async def _churn(here: FleetProcesses, over: asyncio.Event) -> None:
    """End one of two twins, bring it back, and so on; at the end all are there."""
    draw = random.Random(1)
    while not over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_EVERY_S):
                await over.wait()
        victim = draw.choice([*here.places])
        await here.workers[victim].kill()
        await here.start_worker(victim)
        await here.is_known(victim)


async def _hostile(frontend: Frontend, done: Counter[str], over: asyncio.Event) -> None:
    """One kind of misbehaviour after the other."""
    draw = random.Random(2)
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        kinds = {
            "leaves in mid-stream": lambda: _leaves(session, frontend),
            "body with NaN": lambda: _refused(
                session, frontend, b'{"model":"mock","prompt":[' + b"1," * 200_000 + b"NaN]}"
            ),
            "body of empty objects": lambda: _refused(
                session,
                frontend,
                b'{"model":"mock","messages":[' + b"{}," * 200_000 + b"{}]}",
            ),
            "text beyond any context": lambda: _refused(
                session, frontend, b'{"model":"mock","prompt":"' + b"a" * 1_000_000 + b'"}'
            ),
            "upload broken off": lambda: _broken_off(frontend),
            "no HTTP": lambda: _no_http(frontend, draw.randbytes(2000)),
            "metrics": lambda: _get(session, frontend, "/metrics"),
            "fleet": lambda: _get(session, frontend, "/v1/fleet"),
        }
        while not over.is_set():
            kind = draw.choice([*kinds])
            await kinds[kind]()
            done[kind] += 1
            await asyncio.sleep(REST_S)


async def _leaves(session: aiohttp.ClientSession, frontend: Frontend) -> None:
    body = {"model": "mock", "prompt": "one two three", "max_tokens": 500, "stream": True}
    async with session.post(f"{frontend.url}/v1/completions", json=body) as response:
        await response.content.readline()


async def _refused(session: aiohttp.ClientSession, frontend: Frontend, body: bytes) -> None:
    url = f"{frontend.url}/v1/{'chat/' if b'messages' in body else ''}completions"
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
        assert 400 <= response.status < 500, await response.text()


async def _broken_off(frontend: Frontend) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(frontend.ready["port"]))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    writer.write(head + b"x" * 900_000)
    with suppress(OSError):
        await writer.drain()
    writer.transport.abort()


async def _no_http(frontend: Frontend, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(frontend.ready["port"]))
    with suppress(OSError):
        writer.write(data)
        writer.write_eof()
        await reader.read()
    writer.close()


async def _get(session: aiohttp.ClientSession, frontend: Frontend, path: str) -> None:
    async with session.get(frontend.url + path) as response:
        assert response.status == 200
        await response.read()
