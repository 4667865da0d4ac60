"""What every request plane does when the network, a worker or a reader lets it down."""

import asyncio

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.transports.requests.port import (
    EngineStream,
    ReaderTooSlow,
    Registration,
    StreamBroken,
    WorkerUnreachable,
)
from tests.testing.request_transports import DEAD_AFTER_S, RequestTransportSetup
from tests.testing.scripted_worker import IN_TIME_S, ScriptedWorker, accepted, leg, read_all
from tests.testing.tcp_proxy import TcpProxy
from tests.testing.waits import until


def network_of(setup: RequestTransportSetup) -> TcpProxy:
    assert setup.network is not None
    return setup.network


def lose_router(setup: RequestTransportSetup) -> None:
    """Take the router from the worker, and the worker from the router."""
    if setup.reset_is_loss:
        network_of(setup).cut()
    else:
        network_of(setup).pause()


class Watch:
    """What a follower was notified."""

    def __init__(self) -> None:
        self.reported: list[bool] = []
        self._news = asyncio.Event()

    def __call__(self, is_alive: bool) -> None:
        self.reported.append(is_alive)
        self._news.set()

    async def until(self, *reported: bool) -> None:
        async with asyncio.timeout(IN_TIME_S):
            while self.reported != list(reported):
                self._news.clear()
                await self._news.wait()


async def idle(place: Registration) -> bool:
    return await place.wait_idle(IN_TIME_S)


async def broken(stream: EngineStream) -> StreamBroken:
    """Read until the stream breaks."""
    with pytest.raises(StreamBroken) as lost:
        await read_all(stream)
    return lost.value


async def test_follower_hears_of_worker_death_and_return(setup: RequestTransportSetup) -> None:
    address, die = await setup.serve(ScriptedWorker())
    watch = Watch()
    end = setup.transport.follow(address, watch)
    await accepted(setup.transport, address, leg())
    assert watch.reported == []
    await die()
    await watch.until(False)
    assert setup.serve_again is not None
    await setup.serve_again(address, ScriptedWorker())
    await watch.until(False, True)
    await accepted(setup.transport, address, leg())
    end()
    end()


async def test_ended_follower_hears_nothing_and_others_hear_of_death(setup: RequestTransportSetup) -> None:
    address, die = await setup.serve(ScriptedWorker())
    gone, stays = Watch(), Watch()
    end = setup.transport.follow(address, gone)
    setup.transport.follow(address, stays)
    end()
    await die()
    await stays.until(False)
    assert gone.reported == []


async def test_follower_of_an_absent_worker_hears_it_is_not_alive(setup: RequestTransportSetup) -> None:
    watch = Watch()
    setup.transport.follow(setup.nowhere, watch)
    await watch.until(False)


async def test_request_cancelled_while_opening_leaves_no_running_leg(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    worker.answers.clear()
    address, _ = await setup.serve(worker)
    place = setup.places[address]
    opening = asyncio.create_task(accepted(setup.transport, address, leg()))
    await until(lambda: place.running_legs == 1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert await idle(place)
    worker.answers.set()
    await accepted(setup.transport, address, leg(attempt=1))
    assert len(worker.requests) == 1 or worker.streams[0].reasons


async def test_a_lost_connection_breaks_its_streams_and_frees_the_worker(far: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await far.serve(worker)
    reading, waiting = [await accepted(far.transport, address, leg(name)) for name in "xy"]
    await worker.streams[0].put(EngineChunk(token_ids=(1,)))
    assert (await reading.__anext__()).token_ids == (1,)
    reader = asyncio.create_task(broken(reading))
    await asyncio.sleep(0)
    lose_router(far)
    await reader
    await broken(waiting)
    assert await idle(far.places[address])
    async with asyncio.timeout(IN_TIME_S):
        for stream in worker.streams:
            await stream.cancelled.wait()
    network_of(far).resume()
    await accepted(far.transport, address, leg("x", attempt=1))


async def test_half_open_connection_is_detected_on_both_sides_and_recovers(
    far: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await far.serve(worker)
    watch = Watch()
    far.transport.follow(address, watch)
    stream = await accepted(far.transport, address, leg())
    network_of(far).pause()
    await broken(stream)
    await watch.until(False)
    assert await idle(far.places[address])
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
    with pytest.raises(WorkerUnreachable):
        await accepted(far.transport, address, leg("y"))
    network_of(far).resume()
    await watch.until(False, True)
    again = await accepted(far.transport, address, leg(attempt=1))
    await worker.streams[-1].put(EngineChunk(token_ids=(7,), finish=FinishReason.STOP))
    assert (await read_all(again))[0] == [7]


async def test_idle_connection_is_not_reported_as_lost(far: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await far.serve(worker)
    watch = Watch()
    far.transport.follow(address, watch)
    stream = await accepted(far.transport, address, leg())
    # longer than a peer may be silent: heartbeats are not seen from here
    await asyncio.sleep(DEAD_AFTER_S + 0.5)
    assert watch.reported == []
    await worker.streams[0].put(EngineChunk(token_ids=(7,), finish=FinishReason.STOP))
    assert (await read_all(stream))[0] == [7]


async def test_request_arriving_after_its_router_gave_up_leaves_no_leg(
    far: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await far.serve(worker)
    await accepted(far.transport, address, leg("before"))
    network_of(far).pause()
    with pytest.raises(WorkerUnreachable):
        await accepted(far.transport, address, leg("late"))
    network_of(far).resume()
    await until(lambda: far.places[address].running_legs <= 1)
    late = await accepted(far.transport, address, leg("late", attempt=1))
    assert far.places[address].running_legs <= 2
    await worker.streams[-1].put(EngineChunk(token_ids=(7,), finish=FinishReason.STOP))
    assert (await read_all(late))[0] == [7]


async def test_too_slow_reader_is_cut_off_and_others_go_on(far: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await far.serve(worker)
    slow = await accepted(far.transport, address, leg("slow"))
    waits = await accepted(far.transport, address, leg("waits"))
    await worker.streams[0].put(EngineChunk(token_ids=(1, 2, 3)))
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
    assert "reader" in worker.streams[0].reasons[0]
    with pytest.raises(ReaderTooSlow):
        await read_all(slow)
    assert worker.streams[1].reasons == []
    await worker.streams[1].put(EngineChunk(token_ids=(7,), finish=FinishReason.STOP))
    assert (await read_all(waits))[0] == [7]


async def test_ended_prefill_leg_is_cancelled_when_its_router_is_lost(
    far: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await far.serve(worker)
    stream = await accepted(far.transport, address, leg(which=Leg.PREFILL))
    await worker.streams[0].put(EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH))
    await read_all(stream)
    lose_router(far)
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
