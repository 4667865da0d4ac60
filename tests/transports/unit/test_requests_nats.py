"""The request plane over NATS beyond the contract: what is lost on the way, strangers and limits."""

import asyncio
from contextlib import suppress

import msgspec
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from kvrouter.core.errors import ConfigError, InvalidRequest, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.transports.requests import session
from kvrouter.transports.requests.frames import (
    TO_ROUTER,
    TO_WORKER,
    FrameKind,
    FrameReader,
    encoder,
    frame,
)
from kvrouter.transports.requests.nats.transport import (
    WINDOW_TOKENS,
    FromWorker,
    from_router,
    from_worker,
    message_auth_of,
    requests_subject,
)
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from tests.testing.constants import SetConstants
from tests.testing.lossy_nats import TOKEN, MessageFilter, lossy_nats
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.scripted_worker import IN_TIME_S, ScriptedStream, ScriptedWorker, accepted, leg, read_all
from tests.testing.waits import until

SEAL = message_auth_of(TOKEN, "fleet_a")
REQUESTS = requests_subject("fleet_a", WorkerId(7), Epoch(1))


def answers_with(kind: FrameKind) -> MessageFilter:
    """Whether a worker's message carries such a frame: the first one that does is lost."""
    done = False

    def loses(subject: str, message: bytes) -> bool:
        nonlocal done
        _, said = from_worker(SEAL, subject, message)
        if done or kind not in {kind for kind, _ in FrameReader(TO_ROUTER).feed(said.data)}:
            return False
        done = True
        return True

    return loses


def says(kind: FrameKind) -> MessageFilter:
    """Whether a router's message carries such a frame: every one that does is lost."""

    def loses(subject: str, message: bytes) -> bool:
        _, said = from_router(SEAL, subject, message)
        return kind in {kind for kind, _ in FrameReader(TO_WORKER).feed(said.data)}

    return loses


async def put_tokens(stream: ScriptedStream, n_tokens: int) -> None:
    for token in range(n_tokens):
        await stream.put(EngineChunk(token_ids=(token,)))
    await stream.put(EngineChunk(finish=FinishReason.STOP))


async def test_request_over_the_message_limit_arrives_in_parts() -> None:
    with running_nats(max_payload_bytes=4096) as server:
        async with lossy_nats(server) as harness:
            long = leg()
            long.token_ids.extend(range(50_000))
            stream = await accepted(harness.transport, harness.address, long)
            assert harness.worker.requests == [long]
            producer = asyncio.create_task(put_tokens(harness.worker.streams[0], 3000))
            assert (await read_all(stream))[0] == list(range(3000))
            await producer


async def test_request_with_a_lost_part_fails_and_never_runs() -> None:
    with running_nats(max_payload_bytes=4096) as server:
        async with lossy_nats(server) as harness:
            n_parts = 0

            def second_part(_subject: str, message: bytes) -> bool:
                nonlocal n_parts
                n_parts += len(message) > 2000
                return n_parts == 2 and len(message) > 2000

            harness.router_client.loses = second_part
            long = leg()
            long.token_ids.extend(range(50_000))
            with pytest.raises(WorkerUnreachable, match="lost on the way"):
                await accepted(harness.transport, harness.address, long)
            assert harness.worker.requests == []
            await accepted(harness.transport, harness.address, long)


async def test_chunk_over_the_message_limit_arrives_in_parts() -> None:
    with running_nats(max_payload_bytes=4096) as server:
        async with lossy_nats(server) as harness:
            stream = await accepted(harness.transport, harness.address, leg(which=Leg.PREFILL))
            blocks = {"remote_block_ids": list(range(9000))}
            await harness.worker.streams[0].put(
                EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params=blocks)
            )
            assert (await read_all(stream))[1].kv_transfer_params == blocks
            assert await harness.place.wait_idle(IN_TIME_S)


async def test_request_over_the_size_limit_is_an_invalid_request(
    shared_nats: NatsServer, set_constants: SetConstants
) -> None:
    set_constants(session, REQUEST_MAX_BYTES=10)
    async with lossy_nats(shared_nats) as harness:
        with pytest.raises(InvalidRequest, match="over the 10 allowed"):
            await accepted(harness.transport, harness.address, leg())


async def test_a_lost_message_breaks_the_streams_of_its_session(
    shared_nats: NatsServer,
) -> None:
    async with lossy_nats(shared_nats) as harness:
        stream = await accepted(harness.transport, harness.address, leg())
        harness.worker_client.loses = answers_with(FrameKind.CHUNKS)
        await harness.worker.streams[0].put(EngineChunk(token_ids=(1,)))
        await until(lambda: harness.worker_client.n_lost == 1)
        await harness.worker.streams[0].put(EngineChunk(token_ids=(2,)))
        with pytest.raises(StreamBroken, match="lost on the way"):
            await stream.__anext__()
        async with asyncio.timeout(IN_TIME_S):
            await harness.worker.streams[0].cancelled.wait()
        other = await accepted(harness.transport, harness.address, leg("y"))
        await harness.worker.streams[1].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(other))[0] == [4]


async def test_lost_last_message_breaks_the_stream(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats, dead_after_s=3.0) as harness:
        stream = await accepted(harness.transport, harness.address, leg())
        harness.worker_client.loses = answers_with(FrameKind.CHUNKS)
        await harness.worker.streams[0].put(EngineChunk(token_ids=(1,), finish=FinishReason.STOP))
        with pytest.raises(StreamBroken, match="lost on the way"):
            await read_all(stream)


async def test_lost_credit_message_breaks_the_stream(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        harness.router_client.loses = says(FrameKind.CREDIT)
        stream = await accepted(harness.transport, harness.address, leg())
        producer = asyncio.create_task(put_tokens(harness.worker.streams[0], 3 * WINDOW_TOKENS))
        with pytest.raises(StreamBroken, match="lost on the way"):
            await read_all(stream)
        producer.cancel()
        assert harness.router_client.n_lost


async def test_lost_cancel_message_still_cancels_the_leg(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        harness.router_client.loses = says(FrameKind.CANCEL)
        stream = await accepted(harness.transport, harness.address, leg())
        stream.cancel("the client left")
        async with asyncio.timeout(IN_TIME_S):
            await harness.worker.streams[0].cancelled.wait()
        assert "lost on the way" in harness.worker.streams[0].reasons[0]


async def test_lost_sign_of_life_does_not_break_the_stream(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats, dead_after_s=3.0) as harness:
        stream = await accepted(harness.transport, harness.address, leg())
        harness.worker_client.loses = answers_with(FrameKind.PONG)
        await until(lambda: harness.worker_client.n_lost == 1)
        await harness.worker.streams[0].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [4]


async def test_no_signs_of_life_are_published_during_an_outage(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats, dead_after_s=60.0) as harness:
        harness.transport.follow(harness.address, lambda _is_alive: None)
        await until(lambda: bool(harness.router_client.n_published))
        harness.router_client.is_away = True
        before = harness.router_client.n_published
        for _ in range(5):
            await asyncio.sleep(0.05)
        assert harness.router_client.n_published == before
        harness.router_client.is_away = False


async def test_worker_of_another_protocol_version_is_unreachable(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        heard: list[str] = []

        async def hear(message: Msg) -> None:
            heard.append(message.subject)

        old = await nats.connect(shared_nats.url)
        await old.subscribe("kvrouter.fleet_a.requests.8.1", cb=hear)
        await old.flush()
        with pytest.raises(WorkerUnreachable, match="nobody serves"):
            await accepted(harness.transport, harness.address.replace("/7/", "/8/"), leg())
        await old.close()
        assert heard == []


async def test_absent_worker_is_unreachable_at_once(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable, match="nobody serves"):
                await accepted(harness.transport, harness.address.replace("/7/", "/8/"), leg())


async def test_vanished_worker_breaks_streams_before_the_silence_timeout(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        stream = await accepted(harness.transport, harness.address, leg())
        harness.worker_client.loses = lambda _subject, _message: True
        await harness.worker_client.close()
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(StreamBroken, match="nobody serves"):
                await read_all(stream)


async def test_request_with_a_wrong_token_is_refused(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats, router_token="guess", open_timeout_s=0.5) as harness:
        with pytest.raises(WorkerUnreachable):
            await accepted(harness.transport, harness.address, leg())
        assert harness.worker.requests == []
        assert harness.refused
        assert "token" in harness.refused[0]


@given(st.binary(max_size=200))
def test_sealed_garbage_is_read_or_a_protocol_error(garbage: bytes) -> None:
    sealed = SEAL.seal("s", garbage)
    with suppress(ProtocolError):
        from_router(SEAL, "s", sealed)
    with suppress(ProtocolError):
        from_worker(SEAL, "s", sealed)


async def test_garbage_messages_do_not_affect_other_legs(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        client = await nats.connect(shared_nats.url)
        evil = msgspec.msgpack.encode(("a.b", 0, 0, False, b""))
        sealed = [SEAL.seal(REQUESTS, body, number=9) for body in (b"", b"\xc1", evil)]
        for message in (b"", *sealed, b"x" * 100):
            await client.publish(REQUESTS, message)
        first = await accepted(harness.transport, harness.address, leg("first"))
        answers = harness.worker_client.subject.rpartition(".")[0]
        for link in ("x", "12345", "\u00b2"):
            await client.publish(f"{answers}.{link}", b"x" * 100)
        await client.flush()
        await client.close()
        await harness.worker.streams[0].put(EngineChunk(token_ids=(3,), finish=FinishReason.STOP))
        assert (await read_all(first))[0] == [3]
        stream = await accepted(harness.transport, harness.address, leg())
        await harness.worker.streams[1].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [4]
        assert len(harness.refused) == 5
        assert harness.router_client.errors == []


async def test_tokens_in_the_name_of_another_worker_are_ignored(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        stream = await accepted(harness.transport, harness.address, leg())
        tokens = frame(FrameKind.CHUNKS, encoder.encode([(0, (666,), None)]))
        other = msgspec.msgpack.encode(FromWorker(WorkerId(8), Epoch(1), 1, is_sign=False, data=tokens))
        subject = harness.worker_client.subject
        await harness.worker_client.publish(subject, SEAL.seal(subject, other, number=9))
        await harness.worker.streams[0].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [4]


async def test_replayed_messages_are_refused(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        overheard: list[tuple[str, bytes]] = []

        async def overhear(message: Msg) -> None:
            overheard.append((message.subject, message.data))

        stranger = await nats.connect(shared_nats.url)
        await stranger.subscribe("kvrouter.>", cb=overhear)
        for _ in range(2):  # the client's first ping may overtake a subscription; the second cannot
            await stranger.flush()
        first = await accepted(harness.transport, harness.address, leg("first"))
        await until(lambda: len(overheard) > 6)  # pulses and beats among them
        await harness.worker.streams[0].put(EngineChunk(token_ids=(1,), finish=FinishReason.STOP))
        await read_all(first)
        second = await accepted(harness.transport, harness.address, leg("second"))
        before = len(harness.refused)
        again = list(overheard)
        for subject, message in again:
            await stranger.publish(subject, message)
        await until(
            lambda: len(harness.refused) >= before + sum("requests" in subject for subject, _ in again)
        )
        assert set(harness.refused) == {"a router's message came again"}
        await harness.worker.streams[1].put(EngineChunk(token_ids=(2,), finish=FinishReason.STOP))
        assert (await read_all(second))[0] == [2]
        assert [request.request_id for request in harness.worker.requests] == ["first", "second"]
        await stranger.close()


async def test_closed_nats_connection_makes_the_worker_unreachable(shared_nats: NatsServer) -> None:
    async with lossy_nats(shared_nats) as harness:
        stream = await accepted(harness.transport, harness.address, leg())
        await harness.router_client.close()
        with pytest.raises(StreamBroken):
            await read_all(stream)
        with pytest.raises(WorkerUnreachable):
            await accepted(harness.transport, harness.address, leg("y"))
        await harness.worker_client.close()
        with pytest.raises(ConfigError):
            harness.acceptor.serve(harness.acceptor.address_of(WorkerId(8), Epoch(1)), ScriptedWorker())
