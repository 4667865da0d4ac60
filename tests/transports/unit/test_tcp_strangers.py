"""Whoever is not let in, or does not keep to the protocol, is sent away with a reason and hurts nobody."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.frames import HEADER, FrameKind, frame
from kvrouter.transports.requests.handshake import GREETING_BYTES, Secret, greeting, hello
from kvrouter.transports.requests.legs import LegServer
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport
from kvrouter.transports.requests.tcp.pipe import new_nonce
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.request_transports import TOKEN
from tests.testing.scripted_worker import ScriptedWorker, accepted, leg, read_all
from tests.testing.tcp_peers import LoopErrors, RawRouter, RawWorkers, encode_open


@dataclass
class Behind:
    """A listener with one worker, number 1, behind it."""

    acceptor: TcpRequestAcceptor
    worker: ScriptedWorker
    place: LegServer
    refusals: list[str]
    mistakes: LoopErrors = field(default_factory=LoopErrors)


@pytest.fixture
async def behind() -> AsyncIterator[Behind]:
    refusals: list[str] = []
    acceptor = TcpRequestAcceptor(
        "127.0.0.1",
        token=TOKEN,
        limits=WorkerLimits(streams_max=4, connections_max=3),
        on_refused=refusals.append,
    )
    await acceptor.start()
    worker = ScriptedWorker()
    place = acceptor.serve(acceptor.address_of(WorkerId(1), Epoch(1)), worker)
    of = Behind(acceptor, worker, place, refusals)
    unwatch = of.mistakes.watch()
    yield of
    await acceptor.close()
    unwatch()
    assert of.mistakes.seen == []


async def test_peer_of_another_protocol_is_refused_with_a_reason(behind: Behind) -> None:
    peer = await RawRouter.connect(behind.acceptor.port)
    await peer.reader.readexactly(GREETING_BYTES)
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    assert "does not speak" in await peer.goodbye()
    assert "does not speak" in behind.refusals[0]
    await peer.close()


async def test_hello_of_another_version_is_refused(behind: Behind) -> None:
    peer = await RawRouter.connect(behind.acceptor.port)
    await peer.reader.readexactly(GREETING_BYTES)
    peer.send(b"kvrouter\x09\x00")
    assert "version 9, not 1" in await peer.goodbye()
    await peer.close()


async def test_hello_with_a_wrong_token_is_refused_before_its_requests(behind: Behind) -> None:
    for token in ("another", "", None):
        peer = await RawRouter.connect(behind.acceptor.port)
        await peer.say_hello(token=token)
        peer.send_frame(FrameKind.OPEN, encode_open(0, 9, leg()))
        assert "token" in await peer.goodbye()
        await peer.close()
    assert behind.worker.requests == []
    assert len(behind.refusals) == 3


async def test_hello_made_for_another_connection_is_refused(behind: Behind) -> None:
    said = hello(Secret(TOKEN), new_nonce(), new_nonce(), 1, 1)
    peer = await RawRouter.connect(behind.acceptor.port)
    await peer.reader.readexactly(GREETING_BYTES)
    peer.send(said)
    assert "token" in await peer.goodbye()
    await peer.close()


@pytest.mark.parametrize(("worker_id", "incarnation"), [(1, 2), (2, 1)])
async def test_hello_to_a_worker_not_served_here_is_refused(
    behind: Behind, worker_id: int, incarnation: int
) -> None:
    peer = await RawRouter.connect(behind.acceptor.port)
    await peer.say_hello(worker_id, incarnation)
    assert f"worker {worker_id}/{incarnation} is not served here" in await peer.goodbye()
    await peer.close()


async def test_connection_without_a_hello_is_closed_after_a_time() -> None:
    refusals: list[str] = []
    acceptor = TcpRequestAcceptor(
        "127.0.0.1", token=TOKEN, limits=WorkerLimits(hello_within_s=0.05), on_refused=refusals.append
    )
    await acceptor.start()
    peer = await RawRouter.connect(acceptor.port)
    await peer.reader.readexactly(GREETING_BYTES)
    assert "no hello within 0.05 s" in await peer.goodbye()
    await peer.close()
    await acceptor.close()
    assert len(refusals) == 1


async def test_oldest_silent_connections_are_dropped_and_routers_are_admitted() -> None:
    refusals: list[str] = []
    acceptor = TcpRequestAcceptor(
        "127.0.0.1",
        token=TOKEN,
        limits=WorkerLimits(connections_max=2, unauthenticated_max=3),
        on_refused=refusals.append,
    )
    await acceptor.start()
    worker = acceptor.serve(acceptor.address_of(WorkerId(1), Epoch(1)), ScriptedWorker())
    strangers = [await RawRouter.connect(acceptor.port) for _ in range(4)]
    for stranger in strangers:
        await stranger.reader.readexactly(GREETING_BYTES)
    assert await strangers[0].reader.read() == b""
    routers = [await RawRouter.welcomed(acceptor.port) for _ in range(2)]
    assert len(refusals) == 2, "the first router is unauthenticated for a moment"
    assert "the oldest are dropped" in refusals[0]
    assert not strangers[-1].reader.at_eof()
    for peer in [*strangers, *routers]:
        await peer.close()
    worker.leave("the test ends")
    await acceptor.close()


async def test_excess_connection_is_refused_and_open_ones_go_on(behind: Behind) -> None:
    peers = [await RawRouter.welcomed(behind.acceptor.port) for _ in range(3)]
    extra = await RawRouter.connect(behind.acceptor.port)
    await extra.say_hello()
    assert "3 connections are open" in await extra.goodbye()
    peers[0].send_frame(FrameKind.OPEN, encode_open(0, 9, leg()))
    await peers[0].next(FrameKind.ACCEPTED)
    for peer in [*peers, extra]:
        await peer.close()


BAD_FRAMES = {
    "garbage": frame(FrameKind.OPEN, b"\xc1\xff\x00"),
    "an open without a request": frame(FrameKind.OPEN, msgspec.msgpack.encode([1])),
    "a stream twice": frame(FrameKind.OPEN, encode_open(5, 9, leg("a"))) * 2,
    "an older stream": b"".join(frame(FrameKind.OPEN, encode_open(n, 9, leg(str(n)))) for n in (5, 4)),
    "credit of garbage": frame(FrameKind.CREDIT, b"\x93"),
    "nested without end": frame(FrameKind.OPEN, b"\x93\x07\x07" + b"\x91" * 100_000),
    "negative credit": frame(FrameKind.CREDIT, msgspec.msgpack.encode([[0, -5]])),
    "a cancel without a reason": frame(FrameKind.CANCEL, msgspec.msgpack.encode([0])),
    "oversized": HEADER.pack(2**32 - 1, FrameKind.OPEN),
    "a frame of the other side": frame(FrameKind.CHUNKS, b"\x90"),
    "an unknown kind": frame(FrameKind.PING)[:4] + b"\xf0",
    "a second hello": hello(Secret(TOKEN), new_nonce(), new_nonce(), 1, 1),
}


@pytest.mark.parametrize("name", sorted(BAD_FRAMES))
async def test_malformed_frame_ends_its_connection_and_frees_its_legs(behind: Behind, name: str) -> None:
    good, bad = [await RawRouter.welcomed(behind.acceptor.port) for _ in range(2)]
    for peer, request in ((good, "good"), (bad, "bad")):
        peer.send_frame(FrameKind.OPEN, encode_open(0, 9, leg(request)))
        await peer.next(FrameKind.ACCEPTED)
    bad.send(BAD_FRAMES[name])
    assert await bad.goodbye()
    assert len(behind.refusals) == 1
    assert behind.worker.streams[1].reasons != []
    assert behind.place.running_legs == 1
    good.send_frame(FrameKind.OPEN, encode_open(1, 9, leg("more")))
    await good.next(FrameKind.ACCEPTED)
    for peer in (good, bad):
        await peer.close()


async def test_a_connection_that_ends_inside_a_frame_frees_its_legs(behind: Behind) -> None:
    peer = await RawRouter.welcomed(behind.acceptor.port)
    peer.send_frame(FrameKind.OPEN, encode_open(0, 9, leg()))
    await peer.next(FrameKind.ACCEPTED)
    peer.send(frame(FrameKind.OPEN, encode_open(1, 9, leg("cut")))[:-3])
    await peer.close()
    assert await behind.place.wait_idle(20.0)
    assert len(behind.worker.requests) == 1


async def test_undecodable_request_is_refused_and_the_connection_goes_on(behind: Behind) -> None:
    peer = await RawRouter.welcomed(behind.acceptor.port)
    peer.send_frame(FrameKind.OPEN, msgspec.msgpack.encode([0, 9, {"request_id": "x"}]))
    refused = msgspec.msgpack.decode(await peer.next(FrameKind.REFUSED))
    assert refused[:2] == [0, "protocol_error"]
    peer.send_frame(FrameKind.OPEN, encode_open(1, 9, leg()))
    await peer.next(FrameKind.ACCEPTED)
    await peer.close()


async def test_more_streams_than_a_connection_may_have_are_refused_as_full(behind: Behind) -> None:
    setup = TcpRequestTransport(token=TOKEN)
    address = behind.place.address
    for n in range(4):
        await accepted(setup, address, leg(str(n)))
    with pytest.raises(WorkerFull, match="4 streams"):
        await accepted(setup, address, leg("more"))
    await setup.close()


async def test_leg_already_open_on_another_connection_is_refused(behind: Behind) -> None:
    first, second = [await RawRouter.welcomed(behind.acceptor.port) for _ in range(2)]
    first.send_frame(FrameKind.OPEN, encode_open(0, 9, leg()))
    await first.next(FrameKind.ACCEPTED)
    second.send_frame(FrameKind.OPEN, encode_open(0, 9, leg()))
    assert msgspec.msgpack.decode(await second.next(FrameKind.REFUSED))[1] == "leg_repeated"
    await first.close()
    assert await behind.place.wait_idle(20.0)
    second.send_frame(FrameKind.OPEN, encode_open(1, 9, leg(attempt=1)))
    await second.next(FrameKind.ACCEPTED)
    await second.close()


# What a router does with a worker's end that is none, or a bad one


async def test_router_refuses_a_worker_without_the_token() -> None:
    refusals: list[str] = []
    setup = TcpRequestTransport(token=TOKEN, on_refused=refusals.append)
    async with RawWorkers() as workers:
        opening = asyncio.create_task(accepted(setup, workers.address_of(), leg()))
        peer = await workers.welcome_next(token="guessed")
        assert "token" in await peer.goodbye()
        with pytest.raises(WorkerUnreachable, match="does not know the token"):
            await opening
        assert len(refusals) == 1
        await setup.close()


@pytest.mark.parametrize(
    ("first_bytes", "why"),
    [(b"SSH-2.0-OpenSSH\r\n", "does not speak"), (b"kvrouter\x07\x00", "version 7"), (b"", "in time")],
)
async def test_router_refuses_a_peer_that_is_not_a_worker(first_bytes: bytes, why: str) -> None:
    setup = TcpRequestTransport(token=TOKEN, connect_timeout_s=0.1 if not first_bytes else 20.0)
    async with RawWorkers() as workers:
        opening = asyncio.create_task(accepted(setup, workers.address_of(), leg()))
        (await workers.next()).send(first_bytes)
        with pytest.raises(WorkerUnreachable, match=why):
            await opening
        await setup.close()


async def test_a_frame_before_the_welcome_is_refused() -> None:
    setup = TcpRequestTransport(token=TOKEN)
    async with RawWorkers() as workers:
        opening = asyncio.create_task(accepted(setup, workers.address_of(), leg()))
        peer = await workers.next()
        peer.send(greeting(new_nonce()) + frame(FrameKind.CHUNKS, b"\x90"))
        with pytest.raises(WorkerUnreachable, match="may not come"):
            await opening
        await setup.close()


BAD_ANSWERS = {
    "garbage": frame(FrameKind.CHUNKS, b"\xc1"),
    "a token that is none": frame(FrameKind.CHUNKS, msgspec.msgpack.encode([[0, [-1], None]])),
    "a last chunk without credit": frame(
        FrameKind.CHUNKS,
        msgspec.msgpack.encode([[0, [], EngineChunk(tuple(range(17)), finish=FinishReason.STOP)]]),
    ),
    "nested without end": frame(
        FrameKind.CHUNKS,
        b"\x91\x93\x00\x90\x81\xb2kv_transfer_params\x81\xa1x" + b"\x91" * 100_000,
    ),
    "tokens without end": frame(FrameKind.CHUNKS, msgspec.msgpack.encode([[0, list(range(17)), None]])),
    "oversized": HEADER.pack(2**31, FrameKind.CHUNKS),
    "a frame of the other side": frame(FrameKind.OPEN, encode_open(0, 9, leg())),
    "a failure of nothing": frame(FrameKind.FAILED, b"\x90"),
    "a second welcome": frame(FrameKind.WELCOME, b"0" * 32),
}


@pytest.mark.parametrize("name", sorted(BAD_ANSWERS))
async def test_a_worker_that_breaks_the_protocol_breaks_its_streams_with_a_reason(name: str) -> None:
    refusals: list[str] = []
    setup = TcpRequestTransport(
        token=TOKEN, on_refused=refusals.append, limits=RouterLimits(stream_credit_tokens=16)
    )
    async with RawWorkers() as workers:
        opening = asyncio.create_task(accepted(setup, workers.address_of(), leg()))
        peer = await workers.welcome_next()
        await peer.next(FrameKind.OPEN)
        peer.send_frame(FrameKind.ACCEPTED, b"\x00")
        stream = await opening
        peer.send(BAD_ANSWERS[name])
        with pytest.raises(StreamBroken):
            await read_all(stream)
        assert await peer.goodbye()
        assert len(refusals) == 1
        await setup.close()


async def test_answers_to_unknown_streams_are_ignored() -> None:
    setup = TcpRequestTransport(token=TOKEN)
    async with RawWorkers() as workers:
        opening = asyncio.create_task(accepted(setup, workers.address_of(), leg()))
        peer = await workers.welcome_next()
        await peer.next(FrameKind.OPEN)
        peer.send_frame(FrameKind.ACCEPTED, b"\x09")
        peer.send_frame(FrameKind.CHUNKS, msgspec.msgpack.encode([[9, [1], None]]))
        peer.send_frame(FrameKind.FAILED, msgspec.msgpack.encode([9, "stream_broken", "x", None]))
        peer.send_frame(FrameKind.ACCEPTED, b"\x00")
        stream = await opening
        last = EngineChunk((1, 2), finish=FinishReason.STOP)
        peer.send_frame(FrameKind.CHUNKS, msgspec.msgpack.encode([[0, [], last]]))
        assert await read_all(stream) == ([1, 2], last)
        await setup.close()
