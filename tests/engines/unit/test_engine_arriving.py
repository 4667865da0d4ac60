"""A decode leg that comes for waiting KV, and whose client leaves at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.engines.openai.engine import ServedEngine, ZmqEvents
from kvrouter.engines.openai.fetching import FetchingStream
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.attach import VllmClient
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.introspect import ask_info
from kvrouter.transports.requests.port import EngineStream, StreamBroken
from tests.testing.engine_requests import completion_request, engine_request
from tests.testing.scripted_engine import AnswerEnd, ScriptedAnswer, ScriptedEngine, scripted_engine
from tests.testing.scripted_worker import ScriptedStream

PARAMS = {"do_remote_prefill": True, "remote_request_id": "r", "transfer_mode": "push"}
SOON_S = 0.05
IN_TIME_S = 30.0


@asynccontextmanager
async def attached(engine: ScriptedEngine) -> AsyncIterator[ServedEngine]:
    asking, server = EngineServer(engine.url), EngineServer(engine.url)
    await asking.open()
    info = await ask_info(asking)
    await asking.close()
    await server.open()  # with no connection yet: a call takes its time
    at = ServedEngine(
        server, VllmClient(WorkerId(7), info, model="tiny"), ZmqEvents({}, decode, info.block_size or 0)
    )
    try:
        yield at
    finally:
        await at.stop()


async def only(stream: EngineStream) -> list[EngineChunk]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("streams", [True, False])
async def test_cancelled_decode_leg_reaches_its_engine_before_it_is_cancelled(streams: bool) -> None:
    async with scripted_engine() as engine, attached(engine) as at:
        engine.answers.append(ScriptedAnswer(ends=AnswerEnd.NO_HEADERS))
        call = completion_request([1, 2, 3], stream=streams, kv_transfer_params=None).call
        stream = await at.submit(engine_request([1, 2, 3], Leg.DECODE, call=call, kv_transfer_params=PARAMS))
        stream.cancel("client left")
        ended = await only(stream)
        assert [(chunk.finish, chunk.error) for chunk in ended] == [(FinishReason.CANCELLED, "client left")]
        async with asyncio.timeout(IN_TIME_S):
            asked = await engine.called()
            assert asked.body["kv_transfer_params"] == PARAMS
            await asked.left.wait()


async def test_cancelling_ends_a_waiting_read_at_once() -> None:
    inner = ScriptedStream()
    stream = FetchingStream(inner, read_within_s=SOON_S)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.cancel("client left")
    stream.cancel("once more")
    assert (await reading).finish is FinishReason.CANCELLED
    assert inner.reasons == []
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    async with asyncio.timeout(IN_TIME_S):
        await inner.cancelled.wait()
    assert inner.reasons == ["client left"]


async def test_leg_that_has_answered_is_cancelled_at_once() -> None:
    inner = ScriptedStream()
    stream = FetchingStream(inner, read_within_s=IN_TIME_S)
    await inner.put(EngineChunk((5,)))
    assert (await anext(stream)).token_ids == (5,)
    stream.cancel("client left")
    assert inner.reasons == ["client left"]
    assert (await anext(stream)).finish is FinishReason.CANCELLED


async def test_leg_past_the_read_limit_is_cancelled_without_an_answer() -> None:
    inner = ScriptedStream()
    stream = FetchingStream(inner, read_within_s=0.0)
    stream.cancel("client left")
    async with asyncio.timeout(IN_TIME_S):
        await inner.cancelled.wait()


class _Failing:
    def __aiter__(self) -> "_Failing":
        return self

    async def __anext__(self) -> EngineChunk:
        raise StreamBroken("it died")

    def cancel(self, reason: str) -> None:
        raise AssertionError(reason)


async def test_error_of_the_inner_stream_is_raised() -> None:
    with pytest.raises(KvrouterError, match="it died"):
        await anext(FetchingStream(_Failing(), read_within_s=SOON_S))


async def test_cancelling_a_read_does_not_cancel_the_leg() -> None:
    inner = ScriptedStream()
    stream = FetchingStream(inner, read_within_s=SOON_S)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await inner.put(EngineChunk((5,)))
    assert (await anext(stream)).token_ids == (5,)
