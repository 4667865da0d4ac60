"""Tokens that a request plane hands to their reader as they arrive: every plane with a wire can do that."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.port import SentLeg, StreamBroken
from tests.testing.request_transports import (
    PROXIED_REQUEST_TRANSPORTS,
    REQUEST_TRANSPORTS,
    RequestTransportSetup,
)
from tests.testing.scripted_worker import IN_TIME_S, ScriptedWorker, accepted, leg, read_all
from tests.testing.waits import until

ENOUGH = 100_000
"""The token after which a reader wants no more that way."""


@pytest.fixture(params=sorted(PROXIED_REQUEST_TRANSPORTS))
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[RequestTransportSetup]:
    of = await REQUEST_TRANSPORTS[request.param]()
    yield of
    await of.close()


class Handed:
    """One leg, and the tokens that it handed over."""

    def __init__(self, worker: ScriptedWorker, stream: SentLeg) -> None:
        self.inner = worker.streams[-1]
        self.stream = stream
        self.tokens: list[int] = []
        self.handing = asyncio.create_task(stream.hand_over(self._take))

    @classmethod
    async def begin(cls, setup: RequestTransportSetup) -> "Handed":
        worker = ScriptedWorker()
        address, _ = await setup.serve(worker)
        stream = await accepted(setup.transport, address, leg())
        handed = cls(worker, stream)
        await asyncio.sleep(0)
        return handed

    def _take(self, token_ids: Sequence[int]) -> bool:
        self.tokens += token_ids
        return self.tokens[-1] != ENOUGH


async def test_tokens_are_handed_over_until_the_last_chunk_which_is_read(
    setup: RequestTransportSetup,
) -> None:
    handed = await Handed.begin(setup)

    async def produce() -> None:
        for token in range(5_000):
            await handed.inner.put(EngineChunk(token_ids=(token,)))
        await handed.inner.put(EngineChunk(token_ids=(5_000,), finish=FinishReason.LENGTH))

    producer = asyncio.create_task(produce())
    async with asyncio.timeout(IN_TIME_S):
        await handed.handing
    tokens, last = await read_all(handed.stream)
    await producer
    assert len(handed.tokens) > 0
    assert handed.tokens + tokens == list(range(5_001))
    assert last.finish is FinishReason.LENGTH


async def test_reader_that_stops_the_handover_reads_the_rest(setup: RequestTransportSetup) -> None:
    handed = await Handed.begin(setup)
    await handed.inner.put(EngineChunk(token_ids=(ENOUGH,)))
    async with asyncio.timeout(IN_TIME_S):
        await handed.handing
    assert handed.tokens == [ENOUGH]
    await handed.inner.put(EngineChunk(token_ids=(2,), finish=FinishReason.STOP))
    assert (await read_all(handed.stream))[0] == [2]


async def test_chunk_with_more_than_tokens_is_left_to_the_reader(setup: RequestTransportSetup) -> None:
    for reported in (EngineChunk((1,), cached_tokens=64), EngineChunk((1,), kv_bytes=4096)):
        handed = await Handed.begin(setup)
        await handed.inner.put(reported)
        async with asyncio.timeout(IN_TIME_S):
            await handed.handing
            assert await handed.stream.__anext__() == reported
        assert handed.tokens == []


async def test_exception_in_the_sink_is_raised_and_the_leg_goes_on(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())

    def take(_: Sequence[int]) -> bool:
        raise ValueError("no text")

    handing = asyncio.create_task(stream.hand_over(take))
    await asyncio.sleep(0)
    await worker.streams[0].put(EngineChunk(token_ids=(1,)))
    with pytest.raises(ValueError, match="no text"):
        async with asyncio.timeout(IN_TIME_S):
            await handing
    await worker.streams[0].put(EngineChunk(token_ids=(2,), finish=FinishReason.STOP))
    assert (await read_all(stream))[0] == [2]


async def test_worker_death_and_cancellation_end_the_handover(setup: RequestTransportSetup) -> None:
    handed = await Handed.begin(setup)
    await handed.inner.put(EngineChunk(token_ids=(1,)))
    await until(lambda: handed.tokens == [1])
    handed.stream.cancel("the client left")
    async with asyncio.timeout(IN_TIME_S):
        await handed.handing
    assert (await handed.stream.__anext__()).finish is FinishReason.CANCELLED
    worker = ScriptedWorker()
    address, die = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    lost = Handed(worker, stream)
    await asyncio.sleep(0)
    await die()
    async with asyncio.timeout(IN_TIME_S):
        await lost.handing
    with pytest.raises(StreamBroken):
        await read_all(lost.stream)
