"""Requests that arrive and never become whole: what they hold together, and that it goes with them."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.frontend.http import Handler, HttpEvent, Limits, Request, Responder
from tests.testing.http_server import (
    GET,
    LOOPS,
    QUICK,
    RecordingServerEvents,
    Run,
    RunningServer,
    echo,
    runner,
    running_server,
    three_events,
)
from tests.testing.waits import until

MIB = 1024 * 1024
SMALL = Limits(
    body_bytes=4 * MIB, uploads_bytes=5 * MIB, sweep_s=0.02, linger_s=0.2, handler_grace_s=0.1, probe_s=0.02
)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def head(n_bytes: int) -> bytes:
    return b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % n_bytes


class Held:
    """An upload of a test."""

    def __init__(self, uploads: ByteBudget) -> None:
        self._uploads = uploads
        self.gave_way = False

    def shed(self) -> None:
        self.gave_way = True
        self._uploads.hold(self, 0)


def test_the_largest_upload_is_refused_first() -> None:
    uploads = ByteBudget(100)
    small, large, grown = (Held(uploads) for _ in range(3))
    uploads.hold(small, 10)
    uploads.hold(large, 60)
    uploads.hold(grown, 30)
    assert uploads.bytes == 100
    uploads.hold(grown, 50)
    assert (small.gave_way, large.gave_way, grown.gave_way) == (False, True, False)
    assert uploads.bytes == 60
    uploads.hold(grown, 95)
    assert grown.gave_way
    assert not small.gave_way
    uploads.hold(small, 0)
    assert uploads.bytes == 0


async def begun(
    served: RunningServer, *, sent: int, of: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    before = served.server.uploads.bytes
    reader, writer = await served.connect()
    writer.write(head(of) + b"x" * sent)
    await until(lambda: served.server.uploads.bytes >= before + sent)
    return reader, writer


def test_uploads_share_one_budget_that_small_requests_bypass(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo, SMALL) as served:
            first = await begun(served, sent=2 * MIB, of=3 * MIB)
            largest = await begun(served, sent=3 * MIB - 1024, of=3 * MIB)
            assert await served.exchange(head(5).replace(b"x\r\n", b"x\r\nConnection: close\r\n") + b"hello")
            first[1].write(b"x" * 4096)
            refusal = await largest[0].read()
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in refusal.lower()
            assert b'"code":"uploads_full"' in refusal.replace(b" ", b"")
            assert b'"type":"service_unavailable"' in refusal.replace(b" ", b"")
            await until(lambda: served.server.uploads.bytes == len(head(3 * MIB)) + 2 * MIB + 4096)
            first[1].write(b"x" * (MIB - 4096))
            assert (await first[0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
            assert served.server.uploads.bytes == 0
            assert served.counts[HttpEvent.UPLOADS_FULL] == 1

    run(scenario())


def test_earlier_requests_are_answered_before_the_refusal(run: Run) -> None:
    async def scenario() -> None:
        may_answer = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            if request.path == "/a":
                await may_answer.wait()
            await echo(request, responder)

        async with running_server(handler, SMALL) as served:
            reader, writer = await served.connect()
            writer.write(GET)
            await until(lambda: served.server.running == 1)
            writer.write(head(3 * MIB) + b"x" * (3 * MIB))  # whole, and waits for the answer before it
            await until(lambda: served.server.uploads.bytes == len(head(3 * MIB)) + 3 * MIB)
            other = await begun(served, sent=2 * MIB - 1024, of=3 * MIB)
            other[1].write(b"x" * 1024)
            await until(lambda: served.counts[HttpEvent.UPLOADS_FULL] == 1)
            assert served.server.uploads.bytes == len(head(3 * MIB)) + 2 * MIB
            may_answer.set()
            answers = await reader.read()
            assert answers.count(b"HTTP/1.1 ") == 2
            assert answers.startswith(b"HTTP/1.1 200 ")
            assert b"HTTP/1.1 503 " in answers
            other[1].transport.abort()
            await until(lambda: served.server.uploads.bytes == 0)

    run(scenario())


def test_waiting_request_heads_count_as_uploads(run: Run) -> None:
    long_head = GET.replace(b"\r\n\r\n", b"\r\nA: " + b"a" * 60_000 + b"\r\n\r\n")

    async def scenario() -> None:
        may_answer = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            await may_answer.wait()
            await echo(request, responder)

        async with running_server(handler, SMALL) as served:
            _, writer = await served.connect()
            writer.write(long_head * 4 + long_head[:50_000])
            waiting_bytes = 3 * len(long_head) + 50_000
            await until(lambda: served.server.uploads.bytes == waiting_bytes)
            _, other = await served.connect()
            other.write(long_head[:-1])
            await until(lambda: served.server.uploads.bytes == waiting_bytes + len(long_head) - 1)
            other.transport.abort()
            await until(lambda: served.server.uploads.bytes == waiting_bytes)
            may_answer.set()
            await until(lambda: served.server.uploads.bytes == 50_000)
            writer.transport.abort()
            await until(lambda: served.server.uploads.bytes == 0)

    run(scenario())


def test_a_stalled_body_is_a_408(run: Run) -> None:
    limits = Limits(body_s=2.0, body_bytes_per_s=MIB / 64, sweep_s=0.02, linger_s=0.2, handler_grace_s=0.1)

    async def scenario() -> None:
        async with running_server(echo, limits) as served:
            reader, _ = await begun(served, sent=2 * MIB, of=3 * MIB)
            refusal = await reader.read()
            assert refusal.startswith(b"HTTP/1.1 408 ")
            assert b"upload_too_slow" in refusal
            assert served.counts[HttpEvent.UPLOAD_TOO_SLOW] == 1
            assert served.server.uploads.bytes == 0

    run(scenario())


@contextmanager
def no_circles() -> Iterator[None]:
    """Whatever of a connection is left for the garbage collector at the end fails the test."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        left = {
            type(each).__qualname__
            for each in gc.garbage
            if type(each).__module__.startswith(("kvrouter.frontend.", "httptools"))
        }
        assert left == set()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def abort_in_the_body(served: RunningServer) -> None:
    _, writer = await begun(served, sent=MIB, of=2 * MIB)
    writer.transport.abort()


async def abort_in_the_head(served: RunningServer) -> None:
    _, writer = await served.connect()
    writer.write(GET[:10])
    await writer.drain()
    writer.transport.abort()


async def ask(served: RunningServer) -> None:
    assert await served.exchange(GET.replace(b"x\r\n", b"x\r\nConnection: close\r\n"))


async def ask_for_nothing_known(served: RunningServer) -> None:
    assert b" 400 " in await served.exchange(b"GET / HTTP/1.1\r\n\r\n")


async def leave_in_the_answer(served: RunningServer) -> None:
    reader, writer = await served.connect()
    writer.write(GET)
    await reader.readuntil(b"token")
    writer.transport.abort()


@pytest.mark.parametrize(
    ("handler", "client"),
    [
        (echo, abort_in_the_body),
        (echo, abort_in_the_head),
        (echo, ask),
        (echo, ask_for_nothing_known),
        (three_events, ask),
        (RecordingServerEvents().endless, leave_in_the_answer),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_connections_leave_no_reference_cycle(run: Run, handler: Handler, client: object) -> None:
    async def scenario() -> None:
        async with running_server(handler, QUICK) as served:
            await client(served)  # type: ignore[operator]
            await until(lambda: served.server.connections == 0)
            with no_circles():
                await client(served)  # type: ignore[operator]
                await until(lambda: served.server.connections == 0 and served.server.running == 0)

    run(scenario())
