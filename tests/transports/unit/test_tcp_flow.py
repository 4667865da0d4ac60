"""Credits, limits and gathered writes of the tcp request plane."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import InvalidRequest, KvrouterError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.transports.requests import legs, session
from kvrouter.transports.requests.frames import (
    FrameKind,
    ReadItem,
    encode_cancel,
    encode_credits,
    items_decoder,
)
from kvrouter.transports.requests.leg_stream import SessionStream
from kvrouter.transports.requests.port import EngineStream, StreamBroken, WorkerFull
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.constants import SetConstants
from tests.testing.request_transports import TOKEN
from tests.testing.scripted_worker import IN_TIME_S, ScriptedStream, ScriptedWorker, accepted, leg, read_all
from tests.testing.tcp_peers import LoopErrors, RawRouter, RawWorkers, encode_open

Acceptor = tuple[TcpRequestAcceptor, ScriptedWorker, str]


@pytest.fixture
async def served() -> AsyncIterator[Acceptor]:
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await acceptor.start()
    worker = ScriptedWorker()
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    acceptor.serve(address, worker)
    yield acceptor, worker, address
    await acceptor.close()


async def opened(peer: RawRouter, *requests: EngineRequest, credit_tokens: int = 1000) -> None:
    for stream_id, request in enumerate(requests):
        peer.send_frame(FrameKind.OPEN, encode_open(stream_id, credit_tokens, request))
        await peer.next(FrameKind.ACCEPTED)


async def test_tokens_of_many_streams_leave_in_one_frame(served: Acceptor) -> None:
    acceptor, worker, _ = served
    peer = await RawRouter.welcomed(acceptor.port)
    await opened(peer, *(leg(str(n)) for n in range(20)))
    for n, stream in enumerate(worker.streams):
        stream.chunks.put_nowait(EngineChunk((n,)))
    items = items_decoder.decode(await peer.next(FrameKind.CHUNKS))
    assert sorted(items) == [(n, (n,), None) for n in range(20)]
    await peer.close()


async def test_worker_sends_up_to_its_credit_and_goes_on_with_more(served: Acceptor) -> None:
    acceptor, worker, _ = served
    peer = await RawRouter.welcomed(acceptor.port)
    await opened(peer, leg(), credit_tokens=10)
    whole = EngineChunk(
        tuple(range(25)), cached_tokens=64, finish=FinishReason.STOP, kv_transfer_params={"k": 1}
    )
    worker.streams[0].chunks.put_nowait(whole)
    parts = []
    for _ in range(3):
        ((_, token_ids, chunk),) = items_decoder.decode(await peer.next(FrameKind.CHUNKS))
        parts.append(EngineChunk(token_ids) if chunk is None else chunk)
        peer.send_frame(FrameKind.CREDIT, encode_credits({0: 10}))
    assert [part.token_ids for part in parts] == [
        tuple(range(10)),
        tuple(range(10, 20)),
        tuple(range(20, 25)),
    ]
    assert [part.cached_tokens for part in parts] == [64, None, None]
    assert [part.finish for part in parts] == [None, None, FinishReason.STOP]
    assert [part.kv_transfer_params for part in parts] == [None, None, {"k": 1}]
    await peer.close()


async def test_a_last_chunk_without_tokens_needs_no_credit(served: Acceptor) -> None:
    acceptor, worker, _ = served
    peer = await RawRouter.welcomed(acceptor.port)
    await opened(peer, leg(), credit_tokens=1)
    for chunk in (EngineChunk((1,)), EngineChunk(finish=FinishReason.STOP)):
        worker.streams[0].chunks.put_nowait(chunk)
    items: list[ReadItem] = []
    while len(items) < 2:
        items += items_decoder.decode(await peer.next(FrameKind.CHUNKS))
    assert items[1][2] == EngineChunk(finish=FinishReason.STOP)
    await peer.close()


async def _tokens_arrive_once_and_in_order(sizes: list[int], credit_tokens: int, pauses: set[int]) -> None:
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await acceptor.start()
    worker = ScriptedWorker()
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    acceptor.serve(address, worker)
    setup = TcpRequestTransport(token=TOKEN, limits=RouterLimits(stream_credit_tokens=credit_tokens))
    stream = await accepted(setup, address, leg())
    sent: list[int] = []

    async def produce() -> None:
        for size in sizes:
            token_ids = tuple(range(len(sent), len(sent) + size))
            sent.extend(token_ids)
            await worker.streams[0].put(EngineChunk(token_ids))
        await worker.streams[0].put(EngineChunk(finish=FinishReason.LENGTH))

    producer = asyncio.create_task(produce())
    read: list[int] = []
    n_reads = 0
    async with asyncio.timeout(IN_TIME_S):
        async for chunk in stream:
            assert len(chunk.token_ids) <= credit_tokens
            read.extend(chunk.token_ids)
            n_reads += 1
            if n_reads in pauses:
                await asyncio.sleep(0.002)
    await producer
    assert read == sent
    await setup.close()
    await acceptor.close()


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    credit_tokens=st.integers(1, 32),
    pauses=st.sets(st.integers(0, 60)),
)
def test_tokens_arrive_once_and_in_order_whatever_the_credit(
    sizes: list[int], credit_tokens: int, pauses: set[int]
) -> None:
    asyncio.run(_tokens_arrive_once_and_in_order(sizes, credit_tokens, pauses))


async def test_too_large_request_is_an_invalid_request(served: Acceptor, set_constants: SetConstants) -> None:
    set_constants(session, REQUEST_MAX_BYTES=100)
    setup = TcpRequestTransport(token=TOKEN)
    with pytest.raises(InvalidRequest, match="bytes, over the 100 allowed") as refused:
        await accepted(setup, served[2], leg())
    assert refused.value.param == "token_ids"
    await setup.close()


async def test_router_opens_no_more_streams_than_its_limit(served: Acceptor) -> None:
    setup = TcpRequestTransport(token=TOKEN, limits=RouterLimits(streams_max=2))
    first = await accepted(setup, served[2], leg("a"))
    await accepted(setup, served[2], leg("b"))
    with pytest.raises(WorkerFull, match="2 streams"):
        await accepted(setup, served[2], leg("c"))
    first.cancel("the client left")
    await accepted(setup, served[2], leg("c"))
    await setup.close()


async def test_unread_requests_over_the_write_limit_are_refused_as_full() -> None:
    setup = TcpRequestTransport(
        token=TOKEN, limits=RouterLimits(write_max_bytes=3_000_000, open_timeout_s=20.0)
    )
    large = msgspec.structs.replace(leg(), kv_transfer_params={"x": b"0" * 2_000_000})
    async with RawWorkers() as workers:
        openings = [
            asyncio.create_task(
                accepted(setup, workers.address_of(), msgspec.structs.replace(large, attempt=n))
            )
            for n in range(12)
        ]
        peer = await workers.welcome_next()
        done, _ = await asyncio.wait(openings, timeout=IN_TIME_S, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(WorkerFull, match="wait to be read"):
            await done.pop()
        await setup.close()
        await peer.close()
        await asyncio.gather(*openings, return_exceptions=True)


async def test_a_router_that_does_not_read_is_cut_off_at_a_limit() -> None:
    refused = KvrouterError("x" * 8000)
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN, limits=WorkerLimits(write_max_bytes=100_000))
    await acceptor.start()
    worker = ScriptedWorker()
    worker.refusal = refused
    place = acceptor.serve(acceptor.address_of(WorkerId(1), Epoch(1)), worker)
    peer = await RawRouter.welcomed(acceptor.port)
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    stream_id = 0
    async with asyncio.timeout(IN_TIME_S):
        while not peer.writer.transport.is_closing():
            for _ in range(100):
                peer.send_frame(FrameKind.OPEN, encode_open(stream_id, 9, leg(str(stream_id))))
                stream_id += 1
            try:
                await peer.writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
    assert place.running_legs == 0
    await peer.close()
    await acceptor.close()


async def test_too_large_chunk_fails_only_its_own_leg(served: Acceptor) -> None:
    _, worker, address = served
    setup = TcpRequestTransport(token=TOKEN)
    odd, good = [await accepted(setup, address, leg(name)) for name in ("odd", "good")]
    worker.streams[0].chunks.put_nowait(EngineChunk(kv_transfer_params={"x": b"0" * 20_000_000}))
    with pytest.raises(KvrouterError, match="over"):
        await read_all(odd)
    assert worker.streams[0].reasons != []
    worker.streams[1].chunks.put_nowait(EngineChunk((1,), finish=FinishReason.STOP))
    assert (await read_all(good))[0] == [1]
    await setup.close()


async def test_exception_in_an_engine_breaks_its_stream_and_is_reported(served: Acceptor) -> None:
    acceptor, _, _ = served

    class Mistaken(ScriptedStream):
        async def __anext__(self) -> EngineChunk:
            raise ZeroDivisionError("in the engine's adapter")

    class Worker(ScriptedWorker):
        async def submit(self, request: EngineRequest) -> EngineStream:
            return Mistaken()

    address = acceptor.address_of(WorkerId(2), Epoch(1))
    acceptor.serve(address, Worker())
    mistakes = LoopErrors()
    unwatch = mistakes.watch()
    setup = TcpRequestTransport(token=TOKEN)
    with pytest.raises(StreamBroken, match="ZeroDivisionError"):
        await read_all(await accepted(setup, address, leg()))
    assert len(mistakes.seen) == 1
    unwatch()
    await setup.close()


async def test_a_stream_that_ends_without_a_last_chunk_is_broken(served: Acceptor) -> None:
    acceptor, _, _ = served

    class Short(ScriptedStream):
        async def __anext__(self) -> EngineChunk:
            raise StopAsyncIteration

    class Worker(ScriptedWorker):
        async def submit(self, request: EngineRequest) -> EngineStream:
            return Short()

    address = acceptor.address_of(WorkerId(2), Epoch(1))
    acceptor.serve(address, Worker())
    setup = TcpRequestTransport(token=TOKEN)
    with pytest.raises(StreamBroken, match="without a last chunk"):
        await read_all(await accepted(setup, address, leg()))
    await setup.close()


async def test_number_of_kept_ended_prefill_legs_is_bounded(
    served: Acceptor, set_constants: SetConstants
) -> None:
    set_constants(legs, PREFILLED_MAX=3)
    acceptor, worker, _ = served
    peer = await RawRouter.welcomed(acceptor.port)
    for stream_id in range(4):
        peer.send_frame(FrameKind.OPEN, encode_open(stream_id, 9, leg(str(stream_id), which=Leg.PREFILL)))
        await peer.next(FrameKind.ACCEPTED)
        worker.streams[stream_id].chunks.put_nowait(EngineChunk((1,), finish=FinishReason.LENGTH))
        await peer.next(FrameKind.CHUNKS)
    for stream_id in (0, 1):
        peer.send_frame(FrameKind.CANCEL, encode_cancel(stream_id, "nobody decodes"))
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[1].cancelled.wait()
    assert worker.streams[0].reasons == []
    await peer.close()


class Unheard:
    """A connection that hears what its stream tells it."""

    address = "tcp://127.0.0.1:1/1/1"

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def give_credit(self, stream_id: int, tokens: int) -> None:
        pass

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        self.cancelled.append(reason)


async def test_occasional_reads_reset_the_unread_time() -> None:
    stream = SessionStream(Unheard(), 0, credit_tokens=100, request=leg())
    stream.accept()
    for now_s in range(0, 50, 10):
        stream.push(EngineChunk((1,)))
        assert [stream.unread_for_s(now_s + beat) for beat in range(3)] == [0, 1, 2]
        assert (await stream.__anext__()).token_ids == (1,)
    assert stream.unread_for_s(60) == 0
    stream.push(EngineChunk((1,)))
    assert [stream.unread_for_s(1000 + beat) for beat in range(4)] == [0, 1, 2, 3]


async def test_exception_in_one_cancel_does_not_block_other_cancels(served: Acceptor) -> None:
    class Mistaken(ScriptedStream):
        def cancel(self, reason: str) -> None:
            raise ZeroDivisionError("in the engine's adapter")

    acceptor, worker, _ = served
    mistakes = LoopErrors()
    unwatch = mistakes.watch()
    peer = await RawRouter.welcomed(acceptor.port)
    await opened(peer, leg("a"))
    worker.next_stream = Mistaken
    peer.send_frame(FrameKind.OPEN, encode_open(1, 9, leg("b")))
    await peer.next(FrameKind.ACCEPTED)
    worker.next_stream = ScriptedStream
    peer.send_frame(FrameKind.OPEN, encode_open(2, 9, leg("c")))
    await peer.next(FrameKind.ACCEPTED)
    await peer.close()
    async with asyncio.timeout(IN_TIME_S):
        await worker.streams[0].cancelled.wait()
        await worker.streams[2].cancelled.wait()
    assert len(mistakes.seen) == 1
    unwatch()


async def test_engines_wait_while_a_router_does_not_read() -> None:
    limits = WorkerLimits(write_max_bytes=2_000_000, heartbeat_s=1e6, dead_after_s=1e6)
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN, limits=limits)
    await acceptor.start()
    worker = ScriptedWorker()
    acceptor.serve(acceptor.address_of(WorkerId(1), Epoch(1)), worker)
    peer = await RawRouter.welcomed(acceptor.port)
    peer.send_frame(FrameKind.OPEN, encode_open(0, 2**31, leg()))
    await peer.next(FrameKind.ACCEPTED)
    tokens = tuple(range(100_000, 102_000))

    async def produce() -> None:
        for _ in range(2_000):
            await worker.streams[0].put(EngineChunk(tokens))
        await worker.streams[0].put(EngineChunk(finish=FinishReason.LENGTH))

    producer = asyncio.create_task(produce())
    n_put = -1
    while n_put != worker.streams[0].n_put:  # until nothing moves
        n_put = worker.streams[0].n_put
        await asyncio.sleep(0.1)
    assert n_put < 2_000
    n_read, is_over = 0, False
    while not is_over:
        for _, token_ids, last in items_decoder.decode(await peer.next(FrameKind.CHUNKS)):
            n_read += len(token_ids)
            is_over = last is not None
    assert n_read == 2_000 * len(tokens)
    await producer
    await peer.close()
    await acceptor.close()
