"""A worker that drained refuses legs until routers have read that, and then ends."""

import asyncio
from collections.abc import Awaitable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ShuttingDown
from kvrouter.core.ids import DpRank, Epoch, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.engines.port import EngineState
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from tests.testing.scripted_worker import accepted
from tests.testing.virtual_time import run_in_virtual_time
from tests.testing.worker_harness import WorkerHarness

LAST = EngineChunk((5,), FinishReason.LENGTH)
seconds = st.integers(0, 40).map(lambda quarters: quarters / 4)


async def started(propagation_s: float) -> WorkerHarness:
    harness = WorkerHarness(propagation_s=propagation_s)
    await harness.start()
    await harness.cards.get()
    return harness


async def refused(harness: WorkerHarness, name: str = "late") -> type[Exception]:
    """Send a leg that is not taken; return what its router is answered."""
    with pytest.raises((ShuttingDown, WorkerUnreachable)) as error:
        await accepted(harness.requests, harness.worker.card.address, harness.request(request_id=name))
    return error.type


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ended_s(drain: Awaitable[bool]) -> float:
    """Return when a drain ended."""
    await drain
    return now_s()


@given(propagation_s=seconds, leg_s=seconds, limit_s=seconds)
def test_a_worker_ends_once_its_legs_have_and_routers_have_read_its_drain(
    propagation_s: float, leg_s: float, limit_s: float
) -> None:
    """It is withdrawn when its legs have ended or their limit is over, and refuses legs until it ends."""

    async def run() -> None:
        harness = await started(propagation_s)
        stream = await accepted(harness.requests, harness.worker.card.address, harness.request())
        asyncio.get_running_loop().call_later(leg_s, harness.engine.streams[0].chunks.put_nowait, LAST)
        reading = asyncio.gather(anext(aiter(stream)), return_exceptions=True)
        drain = asyncio.create_task(ended_s(harness.worker.drain(limit_s)))
        card = await harness.cards.get()
        assert card is not None
        assert card.draining
        assert await harness.cards.get() is None
        withdrawn_s = now_s()
        await asyncio.wait({drain}, timeout=0.125)  # between the times at which something ends
        for number in count():
            if drain.done():
                break
            assert await refused(harness, f"late {number}") is ShuttingDown
            await asyncio.wait({drain}, timeout=0.25)
        assert withdrawn_s == pytest.approx(min(leg_s, limit_s))
        assert await drain == pytest.approx(max(withdrawn_s, propagation_s))
        assert await refused(harness) is WorkerUnreachable
        assert harness.engine.stops == 1
        (read,) = await reading
        assert isinstance(read, EngineChunk if leg_s < await drain else EngineChunk | StreamBroken)

    run_in_virtual_time(run())


def test_the_time_counts_from_the_first_word_of_the_drain() -> None:
    """Pods that are not Ready drain long before they leave, and are told twice."""

    async def run() -> None:
        harness = await started(2.0)
        await harness.worker.begin_drain()
        await asyncio.sleep(1.5)
        await harness.worker.drain(10.0)
        assert now_s() == pytest.approx(2.0)

    run_in_virtual_time(run())


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_worker_that_does_not_drain_ends_at_once(is_drained: bool) -> None:
    async def run() -> None:
        harness = await started(2.0)
        if is_drained:
            await harness.worker.begin_drain()
            await harness.worker.end_drain()
        await harness.worker.stop()
        assert now_s() == 0.0

    run_in_virtual_time(run())


def test_a_withdrawn_worker_publishes_nothing_under_its_id() -> None:
    """A standby may have it: routers would get the load of this one and the history of its cache."""

    async def run() -> None:
        harness = await started(2.0)
        rank = WorkerRank(harness.worker.card.worker_id, DpRank(0))
        assert harness.worker.publisher.recover_snapshot(rank) is not None
        drain = asyncio.create_task(harness.worker.drain(10.0))
        assert await harness.cards.get() is not None
        assert await harness.cards.get() is None
        tell = harness.engine.on_state
        assert tell is not None
        tell(EngineState(answers=False))
        harness.engine.report(LoadReport(rank, active_blocks=1, total_blocks=2))
        assert harness.worker.publisher.recover_snapshot(rank) is None
        await drain
        assert harness.cards.empty()
        assert harness.loads == []

    run_in_virtual_time(run())


def test_a_drain_that_is_called_off_while_it_is_published_ends_no_worker_late() -> None:
    """As by a pod whose readiness changes twice."""

    async def run() -> None:
        harness = await started(2.0)
        publish, is_stored = harness.discovery.publish, asyncio.Event()

        async def publish_late(card: WorkerCard) -> None:
            harness.discovery.publish = publish  # type: ignore[method-assign]
            await is_stored.wait()
            await publish(card)

        harness.discovery.publish = publish_late  # type: ignore[method-assign]
        begins = asyncio.create_task(harness.worker.begin_drain())
        await asyncio.sleep(0)
        await harness.worker.end_drain()
        is_stored.set()
        await begins
        await harness.worker.stop()
        assert now_s() == 0.0

    run_in_virtual_time(run())


def test_a_worker_whose_card_cannot_be_withdrawn_leaves_nothing_running() -> None:
    async def run() -> None:
        harness = await started(2.0)

        async def fail(worker_id: WorkerId, incarnation: Epoch) -> None:
            raise ConnectionError("the store is gone")

        harness.discovery.withdraw = fail  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await harness.worker.stop()
        assert await refused(harness) is WorkerUnreachable
        assert harness.engine.stops == 1

    run_in_virtual_time(run())


def test_a_worker_whose_end_is_cancelled_leaves_nothing_running() -> None:
    """As by a second signal."""

    async def run() -> None:
        harness = await started(2.0)
        drain = asyncio.create_task(harness.worker.drain(10.0))
        assert await harness.cards.get() is not None
        assert await harness.cards.get() is None
        drain.cancel()
        await asyncio.wait({drain})
        assert (drain.cancelled(), now_s()) == (True, 0.0)
        assert await refused(harness) is WorkerUnreachable
        assert harness.engine.stops == 1

    run_in_virtual_time(run())
