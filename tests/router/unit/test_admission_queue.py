"""The wait for a worker: its order, its end by a placement, a cancel, an error or time, and its place."""

import asyncio

import pytest
from msgspec import structs

from kvrouter.core.errors import AllWorkersBusy
from kvrouter.core.requests import GenerateRequest, ServiceLevel
from kvrouter.core.workers import LoadReport
from kvrouter.kernel.placement.placement import Placement
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.calls import MakeFail
from tests.testing.router_harness import RouterHarness, card, generate_request, router_harness
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

RANK = card(1).ranks()[0]
BUSY, QUIET = (LoadReport(RANK, active_blocks=active, total_blocks=1024) for active in (900, 1))
QUEUE = KvRouterConfig(active_decode_blocks_threshold=0.5, admission_queue_max=2, admission_wait_s=600.0)


async def busy_harness() -> RouterHarness:
    harness = await router_harness(ScriptedTransport(), card(1), config=QUEUE)
    harness.load(BUSY)
    return harness


def placing(harness: RouterHarness, request: GenerateRequest) -> asyncio.Task[Placement]:
    return asyncio.create_task(
        harness.model.place(request, request.token_ids, attempt=0, excluded=frozenset())
    )


def request_of(request_id: str, strict_priority: int = 0) -> GenerateRequest:
    level = ServiceLevel(strict_priority=strict_priority)
    return structs.replace(generate_request(request_id=request_id), service_level=level)


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("strict_priority", [0, 1])
async def test_a_newcomer_does_not_pass_a_request_that_waits(comes_first: bool, strict_priority: int) -> None:
    harness = await busy_harness()
    waiting = placing(harness, request_of("waiting", strict_priority))
    await harness.until_parked()
    if comes_first:
        newcomer = placing(harness, request_of("newcomer"))
        harness.load(QUIET)
    else:
        harness.load(QUIET)
        newcomer = placing(harness, request_of("newcomer"))
    placed = await asyncio.gather(newcomer, waiting)
    in_order = sorted(placed, key=lambda placement: placement.draw.turn)
    assert [placement.decision.request_id for placement in in_order] == ["waiting", "newcomer"]


async def test_a_newcomer_of_a_higher_class_goes_before_those_that_wait() -> None:
    harness = await busy_harness()
    waiting = [placing(harness, request_of(f"r{number}")) for number in range(2)]
    await until(lambda: len(harness.model.placer.waiting) == 2)
    newcomer = placing(harness, request_of("newcomer", 1))
    harness.load(QUIET)
    first, *_ = sorted(await asyncio.gather(newcomer, *waiting), key=lambda placement: placement.draw.turn)
    assert first.decision.request_id == "newcomer", "though the line was full when it came"


async def test_a_newcomer_takes_a_place_of_the_line_only_after_its_try() -> None:
    harness = await busy_harness()
    waiting = placing(harness, request_of("waiting"))
    await harness.until_parked()
    harness.load(BUSY)
    newcomers = [placing(harness, request_of(f"r{number}")) for number in range(3)]
    await until(lambda: sum(task.done() for task in newcomers) == 2)
    assert not newcomers[0].done(), "it found the last place"
    for task in newcomers[1:]:
        with pytest.raises(AllWorkersBusy):
            await task
    assert harness.telemetry.queue_refusals.value("mock", "full") == 2
    harness.load(QUIET)
    await asyncio.gather(waiting, newcomers[0])
    assert len(harness.model.placer.waiting) == 0


async def test_a_wait_that_is_cancelled_after_its_placement_books_nothing() -> None:
    harness = await busy_harness()
    waiting = placing(harness, request_of("waiting"))
    await harness.until_parked()
    harness.load(QUIET)
    asyncio.get_running_loop().call_soon(waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert harness.telemetry.queue_wait.count("mock") == 1, "it was placed"
    assert (harness.booked(), len(harness.model.placer.waiting)) == (0, 0)


async def test_a_wait_that_is_cancelled_leaves_the_line() -> None:
    harness = await busy_harness()
    waiting = placing(harness, request_of("waiting"))
    await harness.until_parked()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(harness.model.placer.waiting) == 0
    harness.load(QUIET)
    await asyncio.sleep(0)
    assert harness.booked() == 0


async def test_an_internal_error_of_one_try_is_raised_where_it_waits(make_fail: MakeFail) -> None:
    harness = await busy_harness()
    waiting = [placing(harness, request_of(f"r{number}")) for number in range(2)]
    await until(lambda: len(harness.model.placer.waiting) == 2)
    make_fail(harness.model.placer, "place", ZeroDivisionError("a mistake"), at_call=0)
    harness.load(QUIET)
    with pytest.raises(ZeroDivisionError):
        await waiting[0]
    assert (await waiting[1]).decision.request_id == "r1"
