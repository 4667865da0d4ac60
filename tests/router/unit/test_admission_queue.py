"""A place in the admission queue: called by a change, ended by time, given back by its owner."""

import asyncio

from kvrouter.kernel.placement.waiting_line import WaitingLine
from kvrouter.router.admission_queue import QueuePlace
from tests.testing.waits import until


def line_of(places_max: int = 100) -> WaitingLine:
    return WaitingLine(places_max=places_max, call_soon=asyncio.get_running_loop().call_soon)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_waiting_requests_are_woken_in_arrival_order() -> None:
    line, woken = line_of(), list[int]()

    async def wait(number: int, place: QueuePlace) -> None:
        assert await place.wait(until_s=now_s() + 30.0)
        woken.append(number)
        place.leave()

    tasks = [asyncio.create_task(wait(number, QueuePlace(line))) for number in range(5)]
    await asyncio.sleep(0)
    line.pulse()
    await until(lambda: len(woken) == 5)
    assert woken == [0, 1, 2, 3, 4]
    assert len(line) == 0
    await asyncio.gather(*tasks)


async def test_a_wait_ends_only_at_a_change_after_it_began() -> None:
    line = line_of()
    place = QueuePlace(line)
    line.pulse()
    await asyncio.sleep(0)
    waiting = asyncio.create_task(place.wait(until_s=now_s() + 30.0))
    await asyncio.sleep(0)
    assert not waiting.done(), "a change before the wait is seen by the try that came before it"
    line.pulse()
    assert await waiting
    place.leave()


async def test_a_wait_past_its_time_ends_and_keeps_its_place() -> None:
    line = line_of(1)
    place = QueuePlace(line)
    assert not await place.wait(until_s=now_s())
    assert not await place.wait(until_s=now_s() + 0.01)
    assert line.is_full, "the place is held until it is given back"
    place.leave()
    place.leave()
    assert len(line) == 0


async def test_a_place_can_be_left_after_its_wait_is_cancelled() -> None:
    line = line_of(1)
    place = QueuePlace(line)
    waiting = asyncio.create_task(place.wait(until_s=now_s() + 30.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    line.pulse()
    await asyncio.sleep(0)
    place.leave()
    assert len(line) == 0
