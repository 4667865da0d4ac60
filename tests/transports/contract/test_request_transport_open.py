"""A leg that was sent and not accepted yet: every request plane says on its first read how that ended."""

import asyncio

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError, ShuttingDown
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.transports.requests.port import (
    LegRepeated,
    SentLeg,
    StreamBroken,
    WorkerDeclined,
    WorkerFull,
    WorkerUnreachable,
)
from tests.testing.request_transports import (
    RequestTransportSetup,
)
from tests.testing.scripted_worker import IN_TIME_S, ScriptedWorker, accepted, leg, read_all
from tests.testing.waits import until


def plain_leg() -> EngineRequest:
    """A leg that fetches no KV."""
    return replace(leg(), kv_transfer_params=None)


async def sent(setup: RequestTransportSetup, request: EngineRequest) -> tuple[ScriptedWorker, str, SentLeg]:
    """A leg at a worker that has it and neither accepts nor refuses it yet."""
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    worker.answers.clear()
    stream = await setup.transport.open(address, request)
    await until(lambda: setup.places[address].running_legs == 1)
    return worker, address, stream


async def test_open_returns_before_the_worker_accepts_and_the_read_waits(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    first = await accepted(setup.transport, address, leg("connects"))
    assert first.is_accepted
    worker.answers.clear()
    stream = await setup.transport.open(address, leg())
    assert not stream.is_accepted
    reading = asyncio.create_task(anext(stream))
    waiting = asyncio.create_task(stream.accepted())
    await until(lambda: setup.places[address].running_legs == 2)
    assert not reading.done()
    assert not waiting.done()
    worker.answers.set()
    await waiting
    await worker.streams[-1].put(EngineChunk((7,), finish=FinishReason.STOP))
    async with asyncio.timeout(IN_TIME_S):
        assert (await reading).token_ids == (7,)
    await stream.accepted()
    assert setup.places[address].running_legs == 1


async def test_a_leg_is_opened_at_once_where_a_connection_is_open(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    await accepted(setup.transport, address, leg("connects"))
    stream = setup.transport.open_now(address, leg())
    assert stream is not None
    await stream.accepted()
    await worker.streams[-1].put(EngineChunk((7,), finish=FinishReason.STOP))
    async with asyncio.timeout(IN_TIME_S):
        assert (await anext(stream)).token_ids == (7,)


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("no", param="token_ids"),
        WorkerFull("no"),
        WorkerDeclined("no"),
        WorkerUnreachable("no"),
        ShuttingDown("no"),
        ProtocolError("no", param="route"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_refusal_is_raised_by_the_first_read(
    setup: RequestTransportSetup, refusal: KvrouterError
) -> None:
    worker = ScriptedWorker()
    worker.refusal = refusal
    address, _ = await setup.serve(worker)
    for attempt, read in enumerate((SentLeg.__anext__, SentLeg.accepted)):
        stream = await setup.transport.open(address, leg(attempt=attempt))
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(type(refusal)) as raised:
                await getattr(stream, read.__name__)()
        assert (raised.value.message, raised.value.param) == (refusal.message, refusal.param)
        assert not stream.is_accepted


async def test_a_leg_sent_twice_is_refused_by_the_first_read(setup: RequestTransportSetup) -> None:
    address, _ = await setup.serve(ScriptedWorker())
    await accepted(setup.transport, address, leg())
    again = await setup.transport.open(address, leg())
    with pytest.raises(LegRepeated):
        await read_all(again)
    assert not again.is_accepted


@pytest.mark.parametrize("fetches_kv", [False, True])
async def test_a_leg_not_accepted_in_time_is_unreachable_and_cancelled(
    setup: RequestTransportSetup, fetches_kv: bool
) -> None:
    worker, address, stream = await sent(setup, leg() if fetches_kv else plain_leg())
    with pytest.raises(WorkerUnreachable, match="did not answer"):
        await read_all(stream)
    assert not stream.is_accepted
    assert await setup.places[address].wait_idle(IN_TIME_S)
    assert worker.requests == []


async def test_a_worker_lost_before_it_accepts_is_unreachable_not_broken(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, die = await setup.serve(worker)
    served = await accepted(setup.transport, address, leg("served"))
    worker.answers.clear()
    stream = await setup.transport.open(address, plain_leg())
    await until(lambda: setup.places[address].running_legs == 2)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    await die()
    with pytest.raises(WorkerUnreachable):
        await reading
    with pytest.raises(StreamBroken):
        await read_all(served)


async def test_a_network_lost_before_acceptance_makes_the_worker_unreachable(
    far: RequestTransportSetup,
) -> None:
    _, address, stream = await sent(far, plain_leg())
    assert far.network is not None
    far.network.pause()
    with pytest.raises(WorkerUnreachable):
        await read_all(stream)
    assert await far.places[address].wait_idle(IN_TIME_S)


async def test_a_plane_closed_before_acceptance_ends_the_read(setup: RequestTransportSetup) -> None:
    _, _, stream = await sent(setup, plain_leg())
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    await setup.transport.close()
    with pytest.raises(WorkerUnreachable):
        await reading


async def test_a_leg_cancelled_before_acceptance_never_reaches_its_engine(
    setup: RequestTransportSetup,
) -> None:
    worker, address, stream = await sent(setup, plain_leg())
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    stream.cancel("the client left")
    async with asyncio.timeout(IN_TIME_S):
        assert (await reading)[1].finish is FinishReason.CANCELLED
        await stream.accepted()
    assert await setup.places[address].wait_idle(IN_TIME_S)
    worker.answers.set()
    await accepted(setup.transport, address, leg("next"))
    assert [request.request_id for request in worker.requests] == ["next"]


async def test_a_cancelled_leg_that_fetches_kv_reaches_its_engine_first(
    setup: RequestTransportSetup,
) -> None:
    worker, _, stream = await sent(setup, leg())
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    stream.cancel("the client left")
    async with asyncio.timeout(IN_TIME_S):
        assert (await reading)[1].finish is FinishReason.CANCELLED
    worker.answers.set()
    await until(lambda: bool(worker.streams))
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
    assert worker.streams[0].reasons == ["the client left"]


async def test_a_cancelled_leg_that_is_read_after_the_limit_reads_cancelled(
    setup: RequestTransportSetup,
) -> None:
    _, address, stream = await sent(setup, leg())
    stream.cancel("the client left")
    assert await setup.places[address].wait_idle(IN_TIME_S)
    assert (await read_all(stream))[1].finish is FinishReason.CANCELLED
