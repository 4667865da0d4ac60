"""Requests that come at once count each other: a worker is given no more than its busy threshold allows."""

import asyncio
from array import array

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import AllWorkersBusy
from kvrouter.core.requests import FinishReason
from kvrouter.core.workers import LoadReport
from kvrouter.settings.router_settings import KvRouterConfig
from tests.oracles.sync import MemorySyncTransport
from tests.testing.mock_fleet import MockFleetHarness, prompt, running_mock_fleet, uniform_fleet
from tests.testing.router_harness import BLOCK_SIZE, RouterHarness, card, generate_request, router_harness
from tests.testing.router_replicas import ReplicaRouter
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport
from tests.testing.waits import until

RANK = card(1).ranks()[0]
BLOCKS = 10
TOTAL = 64
HALF = KvRouterConfig(active_decode_blocks_threshold=0.5)
"""With requests of 10 blocks on a worker of 64: after four of them there are more than 32."""

QUEUE = HALF.model_copy(update={"admission_queue_max": 64, "admission_wait_s": 60.0})


def report(blocks: int) -> LoadReport:
    return LoadReport(RANK, active_blocks=blocks, total_blocks=TOTAL)


async def ask(harness: RouterHarness, number: int) -> int:
    """Send one request of ten blocks that shares none; return how many tokens came."""
    first = 1000 * (number + 1)
    request = replace(
        generate_request(request_id=f"r{number}"),
        token_ids=array("I", range(first, first + BLOCKS * BLOCK_SIZE)),
    )
    async with harness.service.requests.generate(request) as generation:
        return len([token async for chunk in generation for token in chunk.token_ids])


async def settled(plane: ScriptedTransport, asked: list[asyncio.Task[int]]) -> int:
    """Wait until each request was sent or refused; return how many were sent."""
    await until(lambda: len(plane.opened) + sum(each.done() for each in asked) == len(asked))
    return len(plane.opened)


def held(harness: RouterHarness) -> int:
    """Blocks of the worker that are booked."""
    return int(harness.model.ledger.columns().active_blocks.sum())


async def test_concurrent_requests_to_an_idle_worker_stop_at_its_threshold() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=HALF)
    harness.load(report(0))
    asked = [asyncio.create_task(ask(harness, number)) for number in range(8)]
    assert await settled(plane, asked) == 4
    refused = await asyncio.gather(*asked[4:], return_exceptions=True)
    assert all(isinstance(each, AllWorkersBusy) for each in refused)
    assert held(harness) == 4 * BLOCKS
    harness.load(report(0))  # taken before they were there: it changes nothing
    with pytest.raises(AllWorkersBusy):
        await ask(harness, 8)
    for stream in plane.opened:
        stream.tokens(1, finish=FinishReason.STOP)
    assert await asyncio.gather(*asked[:4]) == [1] * 4
    assert len(plane.opened) == 4


async def test_reported_load_and_later_bookings_count_together() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=HALF)
    harness.load(report(20))
    asked = [asyncio.create_task(ask(harness, number)) for number in range(8)]
    assert await settled(plane, asked) == 2, "20, 30, and then 40"
    refused = await asyncio.gather(*asked[2:], return_exceptions=True)
    assert all(isinstance(each, AllWorkersBusy) for each in refused)
    plane.opened[0].tokens(1, finish=FinishReason.STOP)
    assert await asked[0] == 1
    asked.append(asyncio.create_task(ask(harness, 8)))
    await until(lambda: len(plane.opened) == 3)  # what ended since the report counts too
    for stream in plane.opened[1:]:
        stream.tokens(1, finish=FinishReason.STOP)
    await asyncio.gather(asked[1], asked[-1])


async def test_waiting_requests_released_together_count_each_other() -> None:
    opened: asyncio.Queue[ScriptedStream] = asyncio.Queue()
    plane = ScriptedTransport(opened.put_nowait)
    harness = await router_harness(plane, card(1), config=QUEUE)
    harness.load(report(TOTAL))
    waiting = [asyncio.create_task(ask(harness, number)) for number in range(40)]
    await until(lambda: len(harness.model.placer.waiting) == 40)
    most = 0
    for _ in range(40):
        harness.load(report(0))  # which calls all who wait
        stream = await opened.get()
        most = max(most, held(harness))
        stream.tokens(1, finish=FinishReason.STOP)
    assert await asyncio.gather(*waiting) == [1] * 40
    assert most == 4 * BLOCKS


async def test_busy_thresholds_set_later_count_running_requests() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=KvRouterConfig())
    harness.load(report(0))
    asked = [asyncio.create_task(ask(harness, number)) for number in range(4)]
    await until(lambda: len(plane.opened) == 4)
    harness.model.placer.set_busy_thresholds(
        decode_blocks=0.5, prefill_tokens=None, now_s=harness.model.clock()
    )
    with pytest.raises(AllWorkersBusy):
        await ask(harness, 4)
    harness.model.placer.set_busy_thresholds(
        decode_blocks=None, prefill_tokens=None, now_s=harness.model.clock()
    )
    asked.append(asyncio.create_task(ask(harness, 5)))
    await until(lambda: len(plane.opened) == 5)
    for stream in plane.opened:
        stream.tokens(1, finish=FinishReason.STOP)
    assert await asyncio.gather(*asked) == [1] * 5


async def test_other_routers_bookings_count_with_an_earlier_load_report() -> None:
    plane = MemorySyncTransport()
    a = ReplicaRouter("a", plane, workers=(1,))
    b = ReplicaRouter("b", plane, workers=(1,), config=HALF)
    for router in (a, b):
        await router.sync.start()
    assert b.model.reported(report(20))
    placements = [await a.place(n_blocks=BLOCKS) for _ in range(2)]
    await until(lambda: b.loads() == a.loads())
    with pytest.raises(AllWorkersBusy):
        await b.place(n_blocks=BLOCKS)
    a.model.release(placements[0])
    await until(lambda: b.loads() == a.loads())
    b.model.release(await b.place(n_blocks=BLOCKS))
    for router in (a, b):
        await router.sync.stop()


async def test_reporting_engines_exceed_the_threshold_by_at_most_one_request() -> None:
    """A hundred requests of 12 blocks on two engines of 64 blocks that report each step."""
    async with running_mock_fleet(
        uniform_fleet(engine="{total_kv_blocks: 64}"),
        config=QUEUE.model_copy(update={"admission_queue_max": 100}),
    ) as harness:
        most = 0

        async def answer(here: MockFleetHarness, number: int) -> None:
            nonlocal most
            request = here.request(prompt(tokens=12 * 16, first=number + 1), max_tokens=8)
            async with here.service.requests.generate(request) as generation:
                async for _ in generation:
                    most = max(most, int(here.model.ledger.columns().active_blocks.max()))

        await asyncio.gather(*(answer(harness, number) for number in range(100)))
    assert 32 < most <= 32 + 13
