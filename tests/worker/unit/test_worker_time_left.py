"""A worker ends a leg whose request's time is up, though no router says so."""

import asyncio
import math

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import DeadlineExceeded
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.port import StreamBroken
from kvrouter.worker.worker import GRACE_S, REASON, TIME_LEFT_MAX_S, TimedStream
from tests.testing.scripted_worker import ScriptedStream
from tests.testing.virtual_time import run_in_virtual_time
from tests.testing.worker_harness import WorkerHarness

LAST = EngineChunk((7,), FinishReason.LENGTH)
LONG_S = 10 * TIME_LEFT_MAX_S


class Failing(ScriptedStream):
    async def __anext__(self) -> EngineChunk:
        raise StreamBroken("the engine died")


@pytest.mark.parametrize(
    ("time_left_s", "ends_s"),
    [
        (30.0, 30.0 + GRACE_S),
        (0.0, GRACE_S),
        (-5.0, GRACE_S),
        (math.nan, GRACE_S),
        (math.inf, TIME_LEFT_MAX_S + GRACE_S),
    ],
)
def test_a_leg_is_cancelled_a_grace_time_after_its_time_left(time_left_s: float, ends_s: float) -> None:
    async def run() -> None:
        inner = ScriptedStream()
        stream = TimedStream(inner, time_left_s)
        await inner.put(EngineChunk((5,)))
        assert (await anext(stream)).token_ids == (5,)
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
        assert asyncio.get_running_loop().time() == pytest.approx(ends_s)
        assert inner.reasons == [REASON]

    run_in_virtual_time(run())


@pytest.mark.parametrize("ending", ["last chunk", "broken", "cancelled"])
def test_a_leg_that_ended_in_time_is_not_cancelled_later(ending: str) -> None:
    async def run() -> None:
        inner = Failing() if ending == "broken" else ScriptedStream()
        stream = TimedStream(inner, 1.0)
        reasons: list[str] = []
        match ending:
            case "last chunk":
                await inner.put(LAST)
                assert await anext(stream) == LAST
            case "broken":
                with pytest.raises(StreamBroken):
                    await anext(stream)
            case "cancelled":
                stream.cancel("the client left")
                reasons = ["the client left"]
        await asyncio.sleep(LONG_S)
        assert inner.reasons == reasons

    run_in_virtual_time(run())


def test_a_worker_cancels_only_the_leg_whose_time_left_is_over() -> None:
    async def run() -> None:
        harness = WorkerHarness()
        await harness.start()
        endless = await harness.worker.submit(harness.request(request_id="endless"))
        timed = await harness.worker.submit(replace(harness.request(), time_left_s=3.0))
        await asyncio.sleep(3.0 + GRACE_S + 0.1)
        assert [each.cancelled for each in harness.engine.streams] == [None, REASON]
        endless.cancel("done")
        timed.cancel("done")
        await harness.worker.stop()

    run_in_virtual_time(run())
