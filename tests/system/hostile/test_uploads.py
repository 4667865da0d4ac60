"""Uploads that never end, at a real process: what they hold goes with them, and they hurt nobody else."""

import asyncio
import contextlib

import pytest

from tests.testing.processes import Frontend, eventually, fleet

MIB = 1024 * 1024
UPLOADS = 20
ROUNDS = 3
BODY_TIMEOUT_S = 8.0
"""Uploads fill the budget within it, on a busy machine too."""

LEFT_MAX_BYTES = 50 * MIB
"""What may stay of three rounds. One upload is larger."""


@pytest.mark.parametrize(("command", "path"), [("frontend", "/v1/chat/completions"), ("router", "/v1/route")])
async def test_aborted_uploads_leave_no_memory_behind(command: str, path: str) -> None:
    async with fleet() as processes:
        door = await processes.door(command)
        (await door.http.get("/health")).raise_for_status()
        before_bytes = door.rss_bytes()
        for _ in range(ROUNDS):
            await asyncio.gather(*(break_off(door, path, of=60 * MIB, at=59 * MIB) for _ in range(UPLOADS)))
            await eventually(lambda: nothing_arrives(door))
        assert door.rss_bytes() - before_bytes < LEFT_MAX_BYTES
        assert (await door.metrics()).total("http_events_total", event="uploads_full") > 0


async def test_uploads_filling_the_budget_do_not_block_small_requests() -> None:
    async with fleet(
        {"KVROUTER_UPLOADS_MAX_BYTES": str(64 * MIB), "KVROUTER_BODY_TIMEOUT_S": str(BODY_TIMEOUT_S)}
    ) as processes:
        door = await processes.frontend()
        before_bytes = door.rss_bytes()
        held = [await begin(door, "/v1/chat/completions", of=64 * MIB) for _ in range(UPLOADS)]
        filling = [asyncio.create_task(send(writer, 16 * MIB)) for _, writer in held]
        refused = 0
        while not all(task.done() for task in filling):
            answer = await door.http.post("/v1/completions", json={"model": "none", "prompt": "a"})
            refused += "uploads_full" in answer.text
        await asyncio.gather(*filling)
        assert refused == 0
        assert door.rss_bytes() - before_bytes < 2 * 64 * MIB
        answers = await asyncio.gather(*(status_of(reader) for reader, _ in held))
        for _, writer in held:
            writer.transport.abort()
        assert {answer for answer in answers if answer} <= {408, 503}
        metrics = await door.metrics()
        assert metrics.total("http_events_total", event="uploads_full") > 0
        assert metrics.total("http_events_total", event="upload_too_slow") > 0
        await door.has_logged("http_uploads_full")
        await eventually(lambda: nothing_arrives(door))


async def begin(door: Frontend, path: str, *, of: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(door.ready["port"]))
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), of))
    return reader, writer


async def send(writer: asyncio.StreamWriter, n_bytes: int) -> None:
    """Send so much of a body, or as much as is taken."""
    with contextlib.suppress(ConnectionError):
        for _ in range(n_bytes // MIB):
            writer.write(b"a" * MIB)
            await writer.drain()


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the answer; 0 when bytes on their way reset it."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


async def break_off(door: Frontend, path: str, *, of: int, at: int) -> None:
    _, writer = await begin(door, path, of=of)
    await send(writer, at)
    writer.transport.abort()


async def nothing_arrives(door: Frontend) -> bool:
    return (await door.metrics()).total("http_upload_bytes") == 0
