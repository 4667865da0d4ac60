"""A kept connection that the engine closes as a request arrives: it is sent once more on a fresh one, unless
it fetches KV.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouter.engines.openai.server import CallLost, EngineServer
from kvrouter.transports.requests.port import StreamBroken
from tests.testing.asyncio_servers import port_of, serving_streams

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Closing:
    """An engine that answers ``answers_max`` requests of a connection, and ends it as the next one arrives:
    with ``last`` of an answer, cleanly or by a reset.
    """

    def __init__(self, *, answers_max: int = 1, last: bytes = b"", resets: bool = False) -> None:
        self.requests: list[tuple[int, bytes]] = []
        """The number of the connection, and what came."""
        self.answers_max = answers_max
        self._last = last
        self._resets = resets
        self._n_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self._n_connections
        self._n_connections += 1
        for n in range(self.answers_max + 1):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            sizes = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(sizes[0])) if sizes else b""
            self.requests.append((number, head.split(b" ")[0] + b" " + body))
            writer.write(ANSWER if n < self.answers_max else self._last)
            if n == self.answers_max and self._resets:
                writer.transport.abort()


@asynccontextmanager
async def closing(engine: Closing) -> AsyncIterator[EngineServer]:
    async with serving_streams(engine.serve) as listener:
        server = EngineServer(f"http://127.0.0.1:{port_of(listener)}")
        await server.open()
        try:
            yield server
        finally:
            await server.close()


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("body", [b'{"a":1}', b"x" * 1_000_000])
async def test_call_on_a_closed_kept_connection_is_sent_on_a_fresh_one(resets: bool, body: bytes) -> None:
    engine = Closing(resets=resets)
    async with closing(engine) as server:
        for _ in range(6):
            assert await server.ask("/v1/chat/completions", body) == b"{}"
    assert {came for _, came in engine.requests} == {b"POST " + body}
    assert len(engine.requests) == 9  # three of six were sent twice: each other time
    assert len({number for number, _ in engine.requests}) == 6


async def test_probe_succeeds_although_every_kept_connection_is_closed() -> None:
    engine = Closing()
    async with closing(engine) as server:
        both = [server.look("/metrics"), server.look("/metrics")]
        assert await asyncio.gather(*both) == [b"{}", b"{}"]  # two connections are kept now
        assert await server.look("/metrics") == b"{}"


async def test_call_on_a_fresh_connection_is_not_sent_again() -> None:
    engine = Closing(answers_max=0)
    async with closing(engine) as server:
        with pytest.raises(StreamBroken, match="took the call: it closed the connection before it answered"):
            await server.ask("/v1/completions", b"{}")
    assert engine.requests == [(0, b"POST {}")]


async def test_call_that_fetches_kv_is_never_sent_twice() -> None:
    engine = Closing()
    async with closing(engine) as server:
        assert await server.ask("/v1/completions", b"{}", once=True) == b"{}"
        with pytest.raises(CallLost):
            await server.ask("/v1/completions", b"{}", once=True)
    assert len(engine.requests) == 2


async def test_a_call_is_sent_twice_at_most() -> None:
    engine = Closing()
    async with closing(engine) as server:
        assert await server.ask("/v1/completions", b"{}") == b"{}"
        engine.answers_max = 0
        with pytest.raises(StreamBroken):
            await server.ask("/v1/completions", b"{}")
    assert len(engine.requests) == 3


async def test_call_is_not_sent_again_once_its_answer_has_begun() -> None:
    engine = Closing(last=ANSWER[:-1])
    async with closing(engine) as server:
        assert await server.ask("/v1/completions", b"{}") == b"{}"
        with pytest.raises(StreamBroken, match="broke off"):
            await server.ask("/v1/completions", b"{}")
    assert len(engine.requests) == 2
