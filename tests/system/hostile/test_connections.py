"""More connections than a process has file descriptors for: everybody gets an answer, and nothing spins."""

import asyncio
import contextlib
import socket
from collections import Counter

import pytest

from tests.system.hostile.meter import Meter
from tests.testing.processes import Frontend, eventually, fleet

FILES_MAX = 128
CALLERS = 200
CPU_MAX = 0.5
"""Of one core, while nobody asks. A loop that cannot accept, and is reported so for ever, takes all of it."""

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("command", ["frontend", "router"])
async def test_connections_without_a_free_descriptor_get_a_503(command: str) -> None:
    async with fleet(files_max=FILES_MAX) as processes:
        door = await processes.door(command)
        callers: list[socket.socket] = []
        try:
            answers = Counter(await asyncio.gather(*(ask(door, callers) for _ in range(CALLERS))))
            assert set(answers) == {200, 503}, answers
            assert answers[200] >= FILES_MAX // 4
            meter = Meter(door.pid)
            before_s = meter.cpu_s()
            await asyncio.sleep(1.0)
            assert meter.cpu_s() - before_s < CPU_MAX
        finally:
            for caller in callers:
                caller.close()
        await eventually(lambda: is_well(door))
        refused = (await door.metrics()).total("http_events_total", event="connection_refused")
        assert refused >= answers[503]
        await door.has_logged("http_connections_full")
        await door.has_logged(f"files_max={FILES_MAX}")


async def ask(door: Frontend, callers: list[socket.socket]) -> int:
    """Ask on a connection of its own, which stays open; return the status.

    The answer may be there, and the connection closed, before the question was sent: a plain socket still
    reads it.
    """
    loop = asyncio.get_running_loop()
    caller = socket.socket()
    callers.append(caller)
    caller.setblocking(False)
    await loop.sock_connect(caller, ("127.0.0.1", int(door.ready["port"])))
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(caller, GET)
    head = await loop.sock_recv(caller, 4096)
    status = int(head.split()[1])
    assert status == 200 or b"retry-after:" in head.lower()
    return status


async def is_well(door: Frontend) -> bool:
    return (await door.http.get("/health")).status_code == 200
