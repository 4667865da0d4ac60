"""A call whose engine's host is lost: no packet comes back, and nothing closes the connection."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvrouter.engines.openai.server import EngineServer
from kvrouter.transports.requests.port import StreamBroken
from tests.testing.lost_host import drop_packets_to

HALF = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{"
ANSWERS = {b"/whole": HALF + b"}", b"/half": HALF, b"/nothing": b""}
HOST_LOST_S = 2.0
ENDS_WITHIN_S = 60.0
"""Only a test that fails waits as long as this."""


class Host:
    """An engine's server; its host is lost with any call that it does not answer whole."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_lost = False
        while not is_lost:
            self.paths.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
            await reader.readexactly(2)
            writer.write(ANSWERS[self.paths[-1]])
            await writer.drain()
            is_lost = self.paths[-1] != b"/whole"
        drop_packets_to(writer.get_extra_info("socket"))
        await self.over.wait()
        writer.transport.abort()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest_asyncio.fixture
async def server(host: Host) -> AsyncIterator[EngineServer]:
    listener = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server = EngineServer(f"http://127.0.0.1:{port}", host_lost_s=HOST_LOST_S)
    await server.open()
    yield server
    host.over.set()
    await server.close()
    listener.close()
    await listener.wait_closed()


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
