"""The request plane over NATS beyond the contract: what is lost on the way, outages, strangers and limits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from kvrouter.core.errors import ConfigError, InvalidRequest, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.planes.requests.nats import NatsRequestAcceptor, NatsRequestPlane
from kvrouter.planes.requests.nats.frames import (
    Chunk,
    FromWorker,
    Lost,
    Tokens,
    from_router,
    from_worker,
    proof_of,
)
from kvrouter.planes.requests.nats.plane import WINDOW_TOKENS
from kvrouter.planes.requests.port import StreamBroken, WorkerUnreachable
from tests.support.nats_server import NatsServer, running_nats
from tests.support.scripted_worker import IN_TIME_S, ScriptedStream, ScriptedWorker, leg, read_all
from tests.support.waits import until

NAMESPACE = "fleet a"
TOKEN = "t0p"
PATIENCE_S = 30.0
"""What an end is given that must not be the one to end the test."""

Loses = Callable[[bytes], bool]


class LossyClient(Client):
    """A client whose messages a test loses on their way out."""

    def __init__(self) -> None:
        super().__init__()
        self.loses: Loses = lambda _message: False
        self.n_lost = 0
        self.subject = ""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self.subject = subject
        if self.loses(payload):
            self.n_lost += 1
        else:
            await super().publish(subject, payload, reply, headers)


async def lossy_client(server: NatsServer) -> LossyClient:
    async def ignore(_error: Exception) -> None:
        """A test that stops the server knows that it is stopped."""

    client = LossyClient()
    await client.connect(
        server.url,
        error_cb=ignore,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.05,  # type: ignore[arg-type]  # it sleeps for it
    )
    return client


class Ends:
    """A worker and a plane, each with a connection of its own."""

    def __init__(
        self,
        plane: NatsRequestPlane,
        acceptor: NatsRequestAcceptor,
        clients: tuple[LossyClient, LossyClient],
        refused: list[str],
    ) -> None:
        self.plane = plane
        self.acceptor = acceptor
        self.router_client, self.worker_client = clients
        self.refused = refused
        self.worker = ScriptedWorker()
        self.address = acceptor.address_of(WorkerId(7), Epoch(1))
        self.place = acceptor.serve(self.address, self.worker)


@asynccontextmanager
async def both_ends(
    server: NatsServer,
    *,
    router_token: str = TOKEN,
    open_timeout_s: float = IN_TIME_S,
    dead_after_s: float = PATIENCE_S,
) -> AsyncIterator[Ends]:
    clients = (await lossy_client(server), await lossy_client(server))
    refused: list[str] = []
    plane = NatsRequestPlane(
        clients[0],
        namespace=NAMESPACE,
        token=router_token,
        open_timeout_s=open_timeout_s,
        heartbeat_s=0.05,
        dead_after_s=dead_after_s,
        slow_stream_limit_s=PATIENCE_S,
    )
    acceptor = NatsRequestAcceptor(
        clients[1], namespace=NAMESPACE, token=TOKEN, dead_after_s=dead_after_s, on_refused=refused.append
    )
    await acceptor.start()
    ends = Ends(plane, acceptor, clients, refused)
    await acceptor.wait_served(ends.address)
    try:
        yield ends
    finally:
        await plane.close()
        await acceptor.close()
        for client in clients:
            with suppress(OSError):  # the client's own, when its server is down
                await client.close()


def answers_with(*kinds: type[Tokens | Chunk | Lost]) -> Loses:
    """Whether a worker's message carries such a frame: the first one that does is lost."""
    done = False

    def loses(message: bytes) -> bool:
        nonlocal done
        said = from_worker(message, proof_of(TOKEN, "fleet_a"))
        if done or not any(isinstance(frame, kinds) for frame in said.frames):
            return False
        done = True
        return True

    return loses


def says(*kinds: str) -> Loses:
    """Whether a router's message carries such a frame: every one that does is lost."""

    def loses(message: bytes) -> bool:
        said = from_router(message, proof_of(TOKEN, "fleet_a"))
        return any(type(frame).__name__ in kinds for frame in said.frames)

    return loses


async def put_tokens(stream: ScriptedStream, n_tokens: int) -> None:
    for token in range(n_tokens):
        await stream.put(EngineChunk(token_ids=(token,)))
    await stream.put(EngineChunk(finish=FinishReason.STOP))


async def test_a_request_above_what_a_message_holds_comes_in_parts() -> None:
    with running_nats(max_payload_bytes=4096) as server:
        async with both_ends(server) as ends:
            long = leg()
            long.token_ids.extend(range(50_000))
            stream = await ends.plane.open(ends.address, long)
            assert ends.worker.requests == [long]
            producer = asyncio.create_task(put_tokens(ends.worker.streams[0], 3000))
            assert (await read_all(stream))[0] == list(range(3000))
            await producer


async def test_a_part_that_is_lost_is_a_request_that_never_came() -> None:
    with running_nats(max_payload_bytes=4096) as server:
        async with both_ends(server) as ends:
            n_parts = 0

            def second_part(message: bytes) -> bool:
                nonlocal n_parts
                n_parts += len(message) > 2000
                return n_parts == 2 and len(message) > 2000

            ends.router_client.loses = second_part
            long = leg()
            long.token_ids.extend(range(50_000))
            with pytest.raises(WorkerUnreachable, match="part"):
                await ends.plane.open(ends.address, long)
            assert ends.worker.requests == []
            await ends.plane.open(ends.address, long)


async def test_a_chunk_that_no_message_can_hold_ends_its_leg_with_a_reason() -> None:
    with running_nats(max_payload_bytes=4096) as server:
        async with both_ends(server) as ends:
            stream = await ends.plane.open(ends.address, leg(which=Leg.PREFILL))
            blocks = {"remote_block_ids": list(range(9000))}
            await ends.worker.streams[0].put(
                EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params=blocks)
            )
            with pytest.raises(ProtocolError, match="frame of"):
                await read_all(stream)
            assert await ends.place.wait_idle(IN_TIME_S)


async def test_a_request_above_the_limit_never_leaves(
    shared_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.planes.requests.nats.plane.REQUEST_MAX_BYTES", 10)
    async with both_ends(shared_nats) as ends:
        with pytest.raises(InvalidRequest, match="above"):
            await ends.plane.open(ends.address, leg())


async def test_a_size_above_the_limit_is_refused_before_it_is_collected(
    shared_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.planes.requests.nats.acceptor.REQUEST_MAX_BYTES", 10)
    async with both_ends(shared_nats) as ends:
        with pytest.raises(InvalidRequest, match="above"):
            await ends.plane.open(ends.address, leg())


async def test_a_lost_frame_is_a_gap_and_breaks_the_stream(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        stream = await ends.plane.open(ends.address, leg())
        other = await ends.plane.open(ends.address, leg("y"))
        ends.worker_client.loses = answers_with(Tokens)
        await ends.worker.streams[0].put(EngineChunk(token_ids=(1,)))
        await until(lambda: ends.worker_client.n_lost == 1)
        await ends.worker.streams[0].put(EngineChunk(token_ids=(2,)))
        with pytest.raises(StreamBroken, match="never came"):
            await stream.__anext__()
        async with asyncio.timeout(IN_TIME_S):
            await ends.worker.streams[0].cancelled.wait()
        await ends.worker.streams[1].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(other))[0] == [4]


async def test_a_lost_last_frame_is_noticed_though_nothing_follows(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        stream = await ends.plane.open(ends.address, leg())
        ends.worker_client.loses = answers_with(Chunk)
        await ends.worker.streams[0].put(EngineChunk(token_ids=(1,), finish=FinishReason.STOP))
        with pytest.raises(StreamBroken, match="the end of the answer never came"):
            await read_all(stream)


async def test_a_lost_credit_is_repeated(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        ends.router_client.loses = says("Credit")
        stream = await ends.plane.open(ends.address, leg())
        producer = asyncio.create_task(put_tokens(ends.worker.streams[0], 3 * WINDOW_TOKENS))
        assert (await read_all(stream))[0] == list(range(3 * WINDOW_TOKENS))
        await producer
        assert ends.router_client.n_lost


async def test_a_lost_cancellation_is_noticed(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        ends.router_client.loses = says("Cancel")
        stream = await ends.plane.open(ends.address, leg())
        stays = await ends.plane.open(ends.address, leg("stays"))
        stream.cancel("the client left")
        async with asyncio.timeout(IN_TIME_S):
            await ends.worker.streams[0].cancelled.wait()
        assert "gave the leg up" in ends.worker.streams[0].reasons[0]
        await ends.worker.streams[1].put(EngineChunk(finish=FinishReason.STOP))
        await read_all(stays)


async def test_where_nobody_listens_is_known_at_once(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable, match="nobody serves"):
                await ends.plane.open(ends.address.replace("/7/", "/8/"), leg())


async def test_a_worker_that_vanished_is_lost_before_silence_says_so(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        stream = await ends.plane.open(ends.address, leg())
        ends.worker_client.loses = lambda _message: True
        await ends.worker_client.close()
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(StreamBroken, match="nobody serves"):
                await read_all(stream)


async def test_a_stranger_is_refused_before_it_is_parsed(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats, router_token="guess", open_timeout_s=0.5) as ends:
        with pytest.raises(WorkerUnreachable):
            await ends.plane.open(ends.address, leg())
        assert ends.worker.requests == []
        assert ends.refused
        assert "token" in ends.refused[0]


@given(st.binary(max_size=200))
def test_garbage_with_the_right_proof_is_a_protocol_error(garbage: bytes) -> None:
    proof = proof_of(TOKEN, NAMESPACE)
    with suppress(ProtocolError):
        from_router(proof + garbage, proof)
    with suppress(ProtocolError):
        from_worker(proof + garbage, proof)


async def test_garbage_harms_nobody(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        proof = proof_of(TOKEN, "fleet_a")
        client = await nats.connect(shared_nats.url)
        evil = msgspec.msgpack.encode(("a.b", 0, []))
        for message in (b"", proof, proof + b"\xc1", proof + evil, b"x" * 100):
            await client.publish("kvrouter.fleet_a.requests.7.1", message)
        await client.flush()
        await client.close()
        stream = await ends.plane.open(ends.address, leg())
        await ends.worker.streams[0].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [4]
        assert len(ends.refused) == 5


async def test_a_worker_speaks_for_nobody_else(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        stream = await ends.plane.open(ends.address, leg())
        proof = proof_of(TOKEN, "fleet_a")
        other = FromWorker(WorkerId(8), Epoch(1), [Tokens(0, 1, (666,))])
        await ends.worker_client.publish(ends.worker_client.subject, proof + msgspec.msgpack.encode(other))
        await ends.worker.streams[0].put(EngineChunk(token_ids=(4,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [4]


async def test_a_stream_outlives_an_outage_in_which_nothing_was_lost(own_nats: NatsServer) -> None:
    async with both_ends(own_nats) as ends:
        told: list[bool] = []
        ends.plane.follow(ends.address, told.append)
        stream = await ends.plane.open(ends.address, leg())
        await ends.worker.streams[0].put(EngineChunk(token_ids=(1,)))
        assert (await stream.__anext__()).token_ids == (1,)
        own_nats.kill()
        await until(lambda: not (ends.router_client.is_connected or ends.worker_client.is_connected))
        own_nats.start()
        await until(lambda: ends.router_client.is_connected and ends.worker_client.is_connected)
        await ends.router_client.flush()  # it is connected a moment before it listens again
        await ends.worker.streams[0].put(EngineChunk(token_ids=(2,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [2]
        await ends.plane.open(ends.address, leg("after"))


async def test_an_outage_that_lasts_breaks_streams_and_says_nothing_of_the_worker(
    own_nats: NatsServer,
) -> None:
    async with both_ends(own_nats, dead_after_s=0.5, open_timeout_s=0.5) as ends:
        told: list[bool] = []
        ends.plane.follow(ends.address, told.append)
        stream = await ends.plane.open(ends.address, leg())
        own_nats.kill()
        with pytest.raises(StreamBroken, match="not heard"):
            await read_all(stream)
        assert await ends.place.wait_idle(IN_TIME_S)
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable):
                await ends.plane.open(ends.address, leg("y"))
        assert told == []


async def test_a_closed_connection_is_an_unreachable_worker(shared_nats: NatsServer) -> None:
    async with both_ends(shared_nats) as ends:
        stream = await ends.plane.open(ends.address, leg())
        await ends.router_client.close()
        with pytest.raises(StreamBroken):
            await read_all(stream)
        with pytest.raises(WorkerUnreachable):
            await ends.plane.open(ends.address, leg("y"))
        await ends.worker_client.close()
        with pytest.raises(ConfigError):
            ends.acceptor.serve(ends.acceptor.address_of(WorkerId(8), Epoch(1)), ScriptedWorker())
