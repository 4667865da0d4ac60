"""What every request plane does, whatever its wire: order, cancel, back-pressure, refusals, and death."""

import asyncio
from contextlib import suppress
from itertools import count

import pytest
from msgspec.structs import replace

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import DeadlineExceeded, InvalidRequest, KvrouterError
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.transports.requests import legs
from kvrouter.transports.requests.port import (
    EngineStream,
    LegRepeated,
    StreamBroken,
    WorkerDeclined,
    WorkerFull,
    WorkerUnreachable,
)
from kvrouter.worker.worker import TimedStream
from tests.testing.constants import SetConstants
from tests.testing.request_transports import RequestTransportSetup
from tests.testing.scripted_worker import IN_TIME_S, ScriptedStream, ScriptedWorker, accepted, leg, read_all
from tests.testing.waits import until


class TimedWorker(ScriptedWorker):
    """Ends its legs as a worker does, without grace."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        assert request.time_left_s is not None
        return TimedStream(await super().submit(request), request.time_left_s, grace_s=0.0)


async def test_the_request_arrives_unchanged(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    await accepted(setup.transport, address, leg())
    assert worker.requests == [leg()]


async def test_tokens_arrive_once_in_order_with_fields_of_the_last_chunk(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())

    async def produce() -> None:
        for token in range(1, 500):
            await worker.streams[0].put(EngineChunk(token_ids=(token,)))
        last = EngineChunk(
            token_ids=(500,), finish=FinishReason.LENGTH, kv_transfer_params={"remote_block_ids": [[4]]}
        )
        await worker.streams[0].put(last)

    await worker.streams[0].put(EngineChunk(token_ids=(0,), cached_tokens=64))
    first = await stream.__anext__()
    assert first.cached_tokens == 64
    producer = asyncio.create_task(produce())
    tokens, last = await read_all(stream)
    await producer
    assert [*first.token_ids, *tokens] == list(range(501))
    assert last.finish is FinishReason.LENGTH
    assert last.kv_transfer_params == {"remote_block_ids": [[4]]}
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def test_prompt_figures_come_once_with_first_part_of_a_long_chunk(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    long = EngineChunk(tuple(range(5_000)), cached_tokens=64, kv_bytes=4096, finish=FinishReason.LENGTH)
    await worker.streams[0].put(long)
    parts = [chunk async for chunk in stream]
    assert (parts[0].cached_tokens, parts[0].kv_bytes) == (64, 4096)
    assert {(part.cached_tokens, part.kv_bytes) for part in parts[1:]} <= {(None, None)}
    assert [token for part in parts for token in part.token_ids] == list(range(5_000))
    assert parts[-1].finish is FinishReason.LENGTH


async def test_raw_engine_bytes_arrive_whole_and_in_order(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    events = [f"data: {n}\n\n".encode() * (n % 7 + 1) for n in range(3000)]

    async def produce() -> None:
        inner = worker.streams[0]
        for n, raw in enumerate(events):
            token_ids = tuple(range(n, n + n % 3))
            await inner.put(EngineChunk(token_ids=token_ids, raw=raw, text_chars=n % 5))
        await inner.put(EngineChunk(finish=FinishReason.STOP, raw=b"data: [DONE]\n\n", text_chars=0))

    producer = asyncio.create_task(produce())
    chunks = [chunk async for chunk in stream]
    await producer
    assert b"".join(chunk.raw for chunk in chunks) == b"".join(events) + b"data: [DONE]\n\n"
    assert [token for chunk in chunks for token in chunk.token_ids] == [
        token for n in range(3000) for token in range(n, n + n % 3)
    ]
    assert sum(chunk.text_chars or 0 for chunk in chunks) == sum(n % 5 for n in range(3000))
    assert chunks[-1].finish is FinishReason.STOP


async def test_concurrent_streams_do_not_mix(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    streams = [await accepted(setup.transport, address, leg(f"r{n}")) for n in range(5)]
    for n, inner in enumerate(worker.streams):
        await inner.put(EngineChunk(token_ids=(n, n), finish=FinishReason.STOP))
    for n in reversed(range(5)):
        assert (await read_all(streams[n]))[0] == [n, n]


async def test_cancel_reaches_the_worker_with_its_reason_and_ends_the_read(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    reader = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    stream.cancel("client left")
    stream.cancel("client left")
    _, last = await reader
    assert last.finish is FinishReason.CANCELLED
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
    assert set(worker.streams[0].reasons) == {"client left"}


async def test_ended_prefill_leg_can_still_be_cancelled(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg(which=Leg.PREFILL))
    await worker.streams[0].put(EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH))
    await read_all(stream)
    stream.cancel("nobody will decode")
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()


async def test_a_slow_reader_stops_its_own_producer_only(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    slow = await accepted(setup.transport, address, leg("slow"))
    quick = await accepted(setup.transport, address, leg("quick"))

    async def produce(inner: ScriptedStream) -> None:
        for token in range(20_000):
            await inner.put(EngineChunk(token_ids=(token,)))
        await inner.put(EngineChunk(finish=FinishReason.LENGTH))

    producers = [asyncio.create_task(produce(inner)) for inner in worker.streams]
    tokens, _ = await read_all(quick)
    assert tokens == list(range(20_000))
    assert worker.streams[0].n_put < 10_000
    tokens, _ = await read_all(slow)
    assert tokens == list(range(20_000))
    await asyncio.gather(*producers)


async def test_refusal_keeps_its_class_message_and_field(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    worker.refusal = InvalidRequest("token_ids: too many", param="token_ids")
    address, _ = await setup.serve(worker)
    with pytest.raises(InvalidRequest, match="too many") as refused:
        await accepted(setup.transport, address, leg())
    assert refused.value.param == "token_ids"
    worker.refusal = None
    await accepted(setup.transport, address, leg(attempt=1))


async def test_leg_past_its_deadline_fails_and_other_legs_go_on(
    setup: RequestTransportSetup,
) -> None:
    worker = TimedWorker()
    address, _ = await setup.serve(worker)
    patient = await accepted(setup.transport, address, leg("patient"))
    late = await accepted(setup.transport, address, replace(leg("late"), time_left_s=0.0))
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(DeadlineExceeded):
            await read_all(late)
    await until(lambda: setup.places[address].running_legs == 1)
    await worker.streams[0].put(EngineChunk(token_ids=(7,), finish=FinishReason.STOP))
    assert (await read_all(patient))[0] == [7]


async def test_a_worker_that_is_full_is_unreachable(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    worker.refusal = WorkerUnreachable("full")
    address, _ = await setup.serve(worker)
    with pytest.raises(WorkerUnreachable, match="full"):
        await accepted(setup.transport, address, leg())


async def test_address_without_a_worker_is_unreachable(setup: RequestTransportSetup) -> None:
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(WorkerUnreachable):
            await accepted(setup.transport, setup.nowhere, leg())


async def test_a_worker_that_does_not_answer_is_unreachable_in_bounded_time(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    worker.answers.clear()
    address, _ = await setup.serve(worker)
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(WorkerUnreachable):
            await accepted(setup.transport, address, leg())
    worker.answers.set()
    async with asyncio.timeout(IN_TIME_S):
        for attempt in count(1):  # so short a timeout may end before a busy machine has answered
            with suppress(WorkerUnreachable):
                await accepted(setup.transport, address, leg(attempt=attempt))
                return


async def test_worker_death_breaks_a_waiting_read(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, die = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    await worker.streams[0].put(EngineChunk(token_ids=(1,)))
    assert (await stream.__anext__()).token_ids == (1,)
    reader = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    await die()
    with pytest.raises(StreamBroken):
        await reader
    with pytest.raises(StreamBroken):
        await stream.__anext__()
    stream.cancel("too late")


async def test_legs_opened_after_worker_death_are_refused(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, die = await setup.serve(worker)
    await die()
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(WorkerUnreachable):
            await accepted(setup.transport, address, leg())
    assert worker.requests == []


async def test_stream_broken_at_the_worker_breaks_for_the_reader(
    setup: RequestTransportSetup,
) -> None:
    class Breaking(ScriptedStream):
        async def __anext__(self) -> EngineChunk:
            raise StreamBroken("the engine died")

    class Worker(ScriptedWorker):
        async def submit(self, request: EngineRequest) -> EngineStream:
            return Breaking()

    address, _ = await setup.serve(Worker())
    stream = await accepted(setup.transport, address, leg())
    with pytest.raises(StreamBroken):
        await read_all(stream)


async def test_repeated_leg_is_refused_and_other_legs_are_served(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    await accepted(setup.transport, address, leg())
    with pytest.raises(LegRepeated, match="already"):
        await accepted(setup.transport, address, leg())
    await accepted(setup.transport, address, leg(attempt=1))
    await accepted(setup.transport, address, leg(which=Leg.PREFILL))
    await accepted(setup.transport, address, leg("y"))
    assert len(worker.requests) == 4
    await worker.streams[0].put(EngineChunk(finish=FinishReason.STOP))


async def test_leg_repeated_after_it_ended_is_refused_however_it_ended(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    place = setup.places[address]
    answered, cancelled = [
        await accepted(setup.transport, address, leg(name)) for name in ("answered", "cancelled")
    ]
    await worker.streams[0].put(EngineChunk(token_ids=(1,), finish=FinishReason.STOP))
    await read_all(answered)
    cancelled.cancel("the client left")
    worker.refusal = InvalidRequest("no")
    with pytest.raises(InvalidRequest):
        await accepted(setup.transport, address, leg("refused"))
    worker.refusal = None
    assert await place.wait_idle(IN_TIME_S)
    for name in ("answered", "cancelled", "refused"):
        with pytest.raises(LegRepeated, match="before"):
            await accepted(setup.transport, address, leg(name))
    assert (place.running_legs, len(worker.requests)) == (0, 2)
    await accepted(setup.transport, address, leg("answered", attempt=1))


async def test_worker_remembers_a_bounded_number_of_ended_legs(
    setup: RequestTransportSetup, set_constants: SetConstants
) -> None:
    set_constants(legs, ENDED_MAX=2)
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    for n, name in enumerate("abc"):
        stream = await accepted(setup.transport, address, leg(name))
        await worker.streams[n].put(EngineChunk(finish=FinishReason.STOP))
        await read_all(stream)
    for name in "bc":
        with pytest.raises(LegRepeated):
            await accepted(setup.transport, address, leg(name))
    await accepted(setup.transport, address, leg("a"))
    assert len(worker.requests) == 4


async def test_two_requests_with_the_same_client_id_are_both_served(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    requests = [replace(leg(), intake=intake) for intake in ("of one router", "of another")]
    streams = [await accepted(setup.transport, address, request) for request in requests]
    assert worker.requests == requests
    for token, inner in enumerate(worker.streams):
        await inner.put(EngineChunk(token_ids=(token,), finish=FinishReason.STOP))
    assert [(await read_all(stream))[0] for stream in streams] == [[0], [1]]


async def test_cancelling_a_read_does_not_cancel_the_stream(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    reader = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.__anext__()
    await worker.streams[0].put(EngineChunk(token_ids=(5,), finish=FinishReason.STOP))
    assert (await read_all(stream))[0] == [5]


async def test_worker_counts_running_legs_and_reports_idle(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    place = setup.places[address]
    assert (place.running_legs, await place.wait_idle(0.0)) == (0, True)
    read, left = [await accepted(setup.transport, address, leg(name)) for name in "xy"]
    worker.refusal = InvalidRequest("no")
    with pytest.raises(InvalidRequest):
        await accepted(setup.transport, address, leg("z"))
    assert (place.running_legs, await place.wait_idle(0.0)) == (2, False)
    idle = asyncio.create_task(place.wait_idle(IN_TIME_S))
    await worker.streams[0].put(EngineChunk(finish=FinishReason.STOP))
    await read_all(read)
    assert (place.running_legs, idle.done()) == (1, False)
    left.cancel("the client left")
    left.cancel("the client left")
    assert await idle
    assert place.running_legs == 0


async def test_leg_failed_by_its_worker_no_longer_counts_as_running(setup: RequestTransportSetup) -> None:
    class Failing(ScriptedStream):
        async def __anext__(self) -> EngineChunk:
            raise WorkerUnreachable("the engine made a mistake")

    class Worker(ScriptedWorker):
        async def submit(self, request: EngineRequest) -> EngineStream:
            return Failing()

    address, _ = await setup.serve(Worker())
    stream = await accepted(setup.transport, address, leg())
    with pytest.raises(WorkerUnreachable):
        await read_all(stream)
    assert await setup.places[address].wait_idle(IN_TIME_S)


async def test_engine_full_after_acceptance_is_reported_as_worker_full(setup: RequestTransportSetup) -> None:
    class Full(ScriptedStream):
        async def __anext__(self) -> EngineChunk:
            raise WorkerFull("the engine takes no more")

    class Worker(ScriptedWorker):
        async def submit(self, request: EngineRequest) -> EngineStream:
            return Full()

    address, _ = await setup.serve(Worker())
    with pytest.raises(WorkerFull, match="takes no more"):
        await read_all(await accepted(setup.transport, address, leg()))


ANSWER = EngineAnswer(
    429, tuple((b"x-ratelimit-%d" % n, b"\xff" * 490) for n in range(16)), b"\x00\xff" * 22 * 1024
)
"""As long as an engine's answer may be."""


@pytest.mark.parametrize("kind", [InvalidRequest, WorkerFull, WorkerDeclined, WorkerUnreachable])
@pytest.mark.parametrize("is_accepted", [False, True])
async def test_engine_error_answer_arrives_byte_for_byte(
    setup: RequestTransportSetup, kind: type[KvrouterError], is_accepted: bool
) -> None:
    error = kind("w" * 530, param="p" * 500, answer=ANSWER)

    class Failing(ScriptedStream):
        async def __anext__(self) -> EngineChunk:
            raise error

    worker = ScriptedWorker()
    worker.refusal = None if is_accepted else error
    worker.next_stream = Failing
    address, _ = await setup.serve(worker)
    with pytest.raises(KvrouterError) as caught:
        await read_all(await accepted(setup.transport, address, leg()))
    assert caught.value.answer == ANSWER
    assert isinstance(caught.value, kind)
    assert setup.places[address].running_legs == 0
    worker.refusal, worker.next_stream = None, ScriptedStream
    await accepted(setup.transport, address, leg("y"))


async def test_closing_the_plane_breaks_streams_and_cancels_legs_at_workers(
    setup: RequestTransportSetup,
) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    reader = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    await setup.transport.close()
    with pytest.raises(StreamBroken):
        await reader
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
    with pytest.raises(WorkerUnreachable):
        await accepted(setup.transport, address, leg("y"))
