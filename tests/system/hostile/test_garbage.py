"""Thousands of requests that are none: refused one by one, and nothing is left of them."""

import asyncio

import pytest

from tests.system.hostile.bystanders import Bystanders
from tests.system.hostile.meter import MIB, Meter
from tests.testing.processes import eventually, fleet

REQUESTS = 1_000
AT_ONCE = 50
LEFT_BYTES = 30 * MIB
"""So much may stay: the allocator's, and what the first requests of all kinds load."""

GARBAGE = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "no json": b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{]nothing",
    "no number of answers": (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 37\r\n\r\n"
        b'{"model":"mock","prompt":"a","n":-7}\n'
    ),
    "no such model": (
        b'POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 29\r\n\r\n{"model":"none","prompt":"a"}'
    ),
    "head that never ends": b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 200_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_requests_leave_no_memory_or_files_behind(kind: str) -> None:
    async with fleet() as here:
        await here.worker()
        frontend = await here.frontend()
        port = int(frontend.ready["port"])
        meter = Meter(frontend.pid)
        async with Bystanders(frontend) as others:
            await _send(port, GARBAGE[kind], AT_ONCE)
            before_bytes, before_files = meter.resident_bytes(), meter.n_files()
            await _send(port, GARBAGE[kind], REQUESTS)
            assert others.all_go_on
        assert meter.resident_bytes() - before_bytes < LEFT_BYTES

        async def are_closed() -> bool:
            return meter.n_files() <= before_files

        await eventually(are_closed)


async def _send(port: int, data: bytes, times: int) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def send() -> None:
        async with turns:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                writer.write_eof()
                answer = await reader.read()
                assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]
            finally:
                writer.close()
                await writer.wait_closed()

    async with asyncio.TaskGroup() as group:
        for _ in range(times):
            group.create_task(send())
