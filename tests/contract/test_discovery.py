"""What every discovery promises."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.planes.discovery.memory import MemoryDiscovery
from kvrouter.planes.discovery.port import Discovery

OLD, NEW = Epoch(9), Epoch(2)
Heard = WorkerCard | tuple[int, int]


def card(worker_id: int = 1, incarnation: Epoch = OLD) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(worker_id),
        incarnation=incarnation,
        model=ModelName("m"),
        role=Role.BOTH,
        block_size=16,
        context_length=1024,
        address=f"test://{worker_id}",
    )


@pytest.fixture(params=[MemoryDiscovery])
def discovery(request: pytest.FixtureRequest) -> Discovery:
    made: Discovery = request.param()
    return made


async def listen(discovery: Discovery) -> tuple[list[Heard], Callable[[], None]]:
    heard: list[Heard] = []
    end = await discovery.watch(heard.append, lambda *gone: heard.append(gone[:2]))
    return heard, end


async def test_present_cards_come_first_then_changes_in_order(discovery: Discovery) -> None:
    await discovery.publish(card(1))
    await discovery.publish(card(2))
    heard, _ = await listen(discovery)
    await discovery.publish(card(3))
    await discovery.withdraw(WorkerId(1), OLD)
    assert heard == [card(1), card(2), card(3), (1, OLD)]


async def test_the_same_incarnation_again_is_an_update(discovery: Discovery) -> None:
    heard, _ = await listen(discovery)
    await discovery.publish(card())
    drained = replace(card(), draining=True)
    await discovery.publish(drained)
    assert heard == [card(), drained]
    later, _ = await listen(discovery)
    assert later == [drained]


async def test_another_incarnation_is_another_worker(discovery: Discovery) -> None:
    heard, _ = await listen(discovery)
    await discovery.publish(card())
    await discovery.publish(card(incarnation=NEW))
    assert heard == [card(), (1, OLD), card(incarnation=NEW)]


async def test_an_older_incarnation_takes_nothing_away_and_comes_not_back(discovery: Discovery) -> None:
    await discovery.publish(card())
    await discovery.publish(card(incarnation=NEW))
    await discovery.withdraw(WorkerId(1), OLD)
    await discovery.publish(replace(card(), draining=True))
    heard, _ = await listen(discovery)
    assert heard == [card(incarnation=NEW)]


async def test_withdrawing_is_idempotent(discovery: Discovery) -> None:
    await discovery.publish(card())
    heard, _ = await listen(discovery)
    await discovery.withdraw(WorkerId(1), OLD)
    await discovery.withdraw(WorkerId(1), OLD)
    await discovery.withdraw(WorkerId(8), OLD)
    assert heard == [card(), (1, OLD)]


async def test_a_withdrawn_worker_may_come_back(discovery: Discovery) -> None:
    await discovery.publish(card())
    await discovery.withdraw(WorkerId(1), OLD)
    await discovery.publish(card())
    heard, _ = await listen(discovery)
    assert heard == [card()]


async def test_a_watch_that_ended_hears_nothing_and_may_end_twice(discovery: Discovery) -> None:
    heard, end = await listen(discovery)
    end()
    end()
    await discovery.publish(card())
    assert heard == []
