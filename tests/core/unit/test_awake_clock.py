"""A loop that stood still was deaf itself: nobody is dead because of that."""

import asyncio
import time

import pytest

from kvrouter.core.clock import AwakeClock
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.background import tick
from tests.testing.request_transports import DEAD_AFTER_S, PROXIED_REQUEST_TRANSPORTS
from tests.testing.scripted_worker import ScriptedWorker, accepted, leg, read_all


async def test_awake_clock_counts_one_interval_for_a_blocked_loop() -> None:
    clock = AwakeClock(0.01)
    ticking = asyncio.create_task(tick(clock))
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251
    await ticking
    assert clock.now_s == 0.01


@pytest.mark.parametrize("name", ["http", "nats", "tcp"])
async def test_a_blocked_loop_breaks_no_stream_and_reports_no_worker(name: str) -> None:
    setup = await PROXIED_REQUEST_TRANSPORTS[name]()
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    reported: list[bool] = []
    setup.transport.follow(address, reported.append)
    stream = await accepted(setup.transport, address, leg())
    time.sleep(DEAD_AFTER_S + 1)  # noqa: ASYNC251
    await worker.streams[0].put(EngineChunk(token_ids=(7,), finish=FinishReason.STOP))
    assert (await read_all(stream))[0] == [7]
    assert reported == []
    await setup.close()
