"""Clients that leave, or do not read, over a real socket: what runs for them ends, and nothing else does."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings
from kvrouter.transports.requests.port import AliveSink, TokenSink
from tests.testing.frontend_harness import FrontendHarness, running_frontend, text_answer, token_ids
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import silent
from tests.testing.waits import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Raw(NamedTuple):
    """A completion call that a test reads, or does not read, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def leave(self) -> None:
        """Go with a reset, which the server learns of at once; an orderly close may be half of one."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def send_raw(frontend: FrontendHarness, **fields: object) -> Raw:
    reader, writer = await asyncio.open_connection(*frontend.address)
    data = json.dumps({"model": MODEL, "prompt": "hello", **fields}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return Raw(reader, writer)


@pytest.mark.parametrize("after_tokens", [False, True])
async def test_a_client_leaving_cancels_its_engine_and_frees_its_leases(after_tokens: bool) -> None:
    async with running_frontend(card(1), script=silent) as frontend:
        raw = await send_raw(frontend, stream=True)
        worker = await frontend.plane.wait_for(Leg.AGGREGATED)
        if after_tokens:
            worker.tokens(*token_ids("some"))
            await raw.reader.readuntil(b"some")
        raw.leave()
        await until(lambda: frontend.harness.service.requests.running == 0)
        assert worker.cancelled_for is not None
        assert frontend.harness.booked() == 0
        assert frontend.harness.telemetry.requests.value(COMPLETIONS, MODEL, "499") == 1


async def test_a_client_leaving_the_queue_is_not_placed() -> None:
    config = KvRouterConfig(active_prefill_tokens_threshold=0, admission_queue_max=4, admission_wait_s=30.0)
    async with running_frontend(card(1), script=silent, config=config) as frontend:
        first = await send_raw(frontend)
        worker = await frontend.plane.wait_for(Leg.AGGREGATED)
        second = await send_raw(frontend)
        await until(lambda: len(frontend.harness.model.placer.waiting) == 1)
        second.leave()
        await until(lambda: len(frontend.harness.model.placer.waiting) == 0)
        text_answer("ok")(worker)
        await first.reader.readuntil(b"ok")
        first.writer.close()
    assert len(frontend.plane.opened) == 1


class EndlessStream:
    """An engine that could send for ever; counts what is taken of it."""

    def __init__(self) -> None:
        self.taken = 0
        self.cancelled_for: str | None = None
        self.is_accepted = True
        self._chunk = EngineChunk(token_ids=token_ids("word " * 20))

    async def accepted(self) -> None:
        """It is, at once."""

    async def hand_over(self, sink: TokenSink) -> None:
        """Tokens are only read."""

    def __aiter__(self) -> "EndlessStream":
        return self

    async def __anext__(self) -> EngineChunk:
        await asyncio.sleep(0)
        if self.cancelled_for is not None:
            return EngineChunk(finish=FinishReason.CANCELLED)
        self.taken += 1
        return self._chunk

    def cancel(self, reason: str) -> None:
        self.cancelled_for = reason


class EndlessPlane:
    """Every request gets an endless stream."""

    def __init__(self) -> None:
        self.streams: list[EndlessStream] = []

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        return lambda: None

    async def open(self, address: str, request: EngineRequest) -> EndlessStream:
        return self.open_now(address, request)

    def open_now(self, address: str, request: EngineRequest) -> EndlessStream:
        self.streams.append(EndlessStream())
        return self.streams[-1]

    async def close(self) -> None:
        """Nothing to close."""


async def test_a_client_not_reading_slows_its_engine_stream() -> None:
    settings = FrontendSettings(write_high_water_bytes=4096, write_low_water_bytes=1024)
    plane = EndlessPlane()
    async with running_frontend(card(1), plane=plane, settings=settings) as frontend:
        raw = await send_raw(frontend, stream=True, max_tokens=400)
        await until(lambda: bool(plane.streams))
        (stream,) = plane.streams
        last = -1
        while stream.taken != last:  # until the engine is no longer read, for a long time as turns go
            last = stream.taken
            for _ in range(2000):
                await asyncio.sleep(0)
        assert frontend.harness.service.requests.running == 1
        while stream.taken == last:
            assert await raw.reader.read(100_000)
        raw.leave()
        await until(lambda: stream.cancelled_for is not None)
        await until(lambda: frontend.harness.service.requests.running == 0)


async def test_a_stream_cut_by_a_drain_ends_with_an_error() -> None:
    async with running_frontend(card(1), script=silent) as frontend:
        raw = await send_raw(frontend, stream=True)
        (await frontend.plane.wait_for(Leg.AGGREGATED)).tokens(*token_ids("half"))
        await raw.reader.readuntil(b"half")
        assert await frontend.harness.service.requests.drain(0.0) == 1
        rest = await raw.reader.readuntil(b"0\r\n\r\n")
        raw.leave()
    assert b"[DONE]" not in rest
    assert b"shutting_down" in rest
