"""A call whose engine's host is lost: no packet comes back, and nothing closes the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import pytest_asyncio

from kvrouter.engines.openai.server import EngineServer
from kvrouter.transports.requests.port import StreamBroken
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.lost_host import drop_packets_to

HALF = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{"
ANSWERS = {b"/whole": HALF + b"}", b"/half": HALF, b"/nothing": b""}
LONG = b"x" * 1_000_000
"""More than a host takes for a server that does not read."""

HOST_LOST_S = 2.0
ENDS_WITHIN_S = 60.0
"""Only a test that fails waits as long as this."""


class Host:
    """An engine's server; its host is lost with any call that it does not answer whole."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_lost = False
        while not is_lost:
            self.paths.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
            await reader.readexactly(2)
            writer.write(ANSWERS[self.paths[-1]])
            await writer.drain()
            is_lost = self.paths[-1] != b"/whole"
        drop_packets_to(writer.get_extra_info("socket"))
        await asyncio.Event().wait()


class Frozen:
    """An engine's server that reads nothing until ``reads`` is set, and then answers; with ``loses_host`` its
    host is lost once that has no room for more.
    """

    def __init__(self, *, loses_host: bool) -> None:
        self.reads = asyncio.Event()
        self._loses_host = loses_host

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        if self._loses_host:
            await asyncio.sleep(0.5)  # nothing here shows that the sender knows that there is no room
            drop_packets_to(writer.get_extra_info("socket"))
        await self.reads.wait()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            if not self._loses_host:
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(LONG))
                writer.write(ANSWERS[b"/whole"])
                await reader.read()  # until the client ends the connection


@pytest.fixture
def host() -> Host:
    return Host()


@pytest_asyncio.fixture
async def server(host: Host) -> AsyncIterator[EngineServer]:
    async with serving_streams(host.serve) as listener:
        server = EngineServer(f"http://127.0.0.1:{port_of(listener)}", host_lost_s=HOST_LOST_S)
        await server.open()
        yield server
        await server.close()


@pytest.mark.parametrize(("path", "why"), [("/nothing", "its host does not answer"), ("/half", "broke off")])
async def test_a_call_ends_once_the_host_of_its_engine_is_lost(
    server: EngineServer, path: str, why: str
) -> None:
    async with asyncio.timeout(ENDS_WITHIN_S):
        with pytest.raises(StreamBroken, match=why):
            await server.ask(path, b"{}")


async def test_a_call_on_a_kept_connection_is_not_sent_again_to_a_lost_host(
    host: Host, server: EngineServer
) -> None:
    assert await server.ask("/whole", b"{}") == b"{}"
    async with asyncio.timeout(ENDS_WITHIN_S):
        with pytest.raises(StreamBroken, match="host does not answer"):
            await server.ask("/nothing", b"{}")
    assert host.paths == [b"/whole", b"/nothing"]


@asynccontextmanager
async def frozen(engine: Frozen) -> AsyncIterator[EngineServer]:
    async with serving_streams(engine.serve) as listener:
        server = EngineServer(f"http://127.0.0.1:{port_of(listener)}", host_lost_s=HOST_LOST_S)
        await server.open()
        try:
            yield server
        finally:
            await server.close()


async def test_an_engine_that_reads_nothing_for_long_keeps_a_long_call() -> None:
    engine = Frozen(loses_host=False)
    async with frozen(engine) as server, asyncio.timeout(ENDS_WITHIN_S):
        asyncio.get_running_loop().call_later(3 * HOST_LOST_S, engine.reads.set)
        assert await server.ask("/whole", LONG) == b"{}"


async def test_a_long_call_ends_once_the_host_of_a_frozen_engine_is_lost() -> None:
    async with frozen(Frozen(loses_host=True)) as server, asyncio.timeout(ENDS_WITHIN_S):
        with pytest.raises(StreamBroken, match="its host does not answer"):
            await server.ask("/whole", LONG)
