"""The request plane over NATS while the server is away, and when it is back."""

import asyncio
from contextlib import suppress

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from tests.support.nats_ends import PATIENCE_S, both_ends
from tests.support.nats_server import NatsServer
from tests.support.scripted_worker import IN_TIME_S, leg, read_all
from tests.support.waits import until


async def test_a_stream_outlives_an_outage_in_which_nothing_was_lost(own_nats: NatsServer) -> None:
    async with both_ends(own_nats) as ends:
        reported: list[bool] = []
        ends.transport.follow(ends.address, reported.append)
        stream = await ends.transport.open(ends.address, leg())
        await ends.worker.streams[0].put(EngineChunk(token_ids=(1,)))
        assert (await stream.__anext__()).token_ids == (1,)
        own_nats.kill()
        await until(lambda: not (ends.router_client.is_connected or ends.worker_client.is_connected))
        own_nats.start()
        await until(lambda: ends.router_client.is_connected and ends.worker_client.is_connected)
        await ends.router_client.flush()  # it is connected a moment before it listens again
        await ends.worker.streams[0].put(EngineChunk(token_ids=(2,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [2]
        await ends.transport.open(ends.address, leg("after"))


async def test_an_outage_that_lasts_breaks_streams_and_says_nothing_of_the_worker(
    own_nats: NatsServer,
) -> None:
    async with both_ends(own_nats, dead_after_s=0.5, open_timeout_s=0.5) as ends:
        reported: list[bool] = []
        ends.transport.follow(ends.address, reported.append)
        stream = await ends.transport.open(ends.address, leg())
        own_nats.kill()
        with pytest.raises(StreamBroken, match="nothing was heard"):
            await read_all(stream)
        assert await ends.place.wait_idle(IN_TIME_S)
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable):
                await ends.transport.open(ends.address, leg("y"))
        assert reported == []


async def test_nothing_is_opened_while_nats_is_away(own_nats: NatsServer) -> None:
    async with both_ends(own_nats, open_timeout_s=1000.0) as ends:
        ends.worker_client.loses = lambda _subject, _message: True
        waits = asyncio.create_task(ends.transport.open(ends.address, leg()))
        await until(lambda: bool(ends.worker.requests))
        own_nats.kill()
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable, match="the connection to NATS is down"):
                await waits
            ends.router_client.loses = lambda _subject, _message: True
            for _ in range(3):
                with pytest.raises(WorkerUnreachable, match="the connection to NATS is down"):
                    await ends.transport.open(ends.address, leg("y"))
        assert ends.router_client.n_lost == 0
        own_nats.start()
        await until(lambda: ends.router_client.is_connected and ends.worker_client.is_connected)


async def test_a_worker_that_is_followed_while_nats_is_away_is_heard_when_it_is_back(
    own_nats: NatsServer,
) -> None:
    async with both_ends(own_nats) as ends:
        own_nats.kill()
        await until(lambda: not ends.router_client.is_connected)
        ends.transport.follow(ends.address, lambda _is_alive: None)
        own_nats.start()
        await until(lambda: ends.router_client.is_connected and ends.worker_client.is_connected)
        await ends.worker_client.flush()
        await ends.transport.open(ends.address, leg())


@pytest.mark.parametrize("dead_after_s", [PATIENCE_S, 0.5])
async def test_who_is_back_before_the_worker_gives_it_time(own_nats: NatsServer, dead_after_s: float) -> None:
    async with both_ends(own_nats, dead_after_s=dead_after_s) as ends:
        reported: list[bool] = []
        ends.transport.follow(ends.address, reported.append)
        own_nats.kill()
        await until(lambda: not ends.router_client.is_connected)
        with suppress(OSError):  # the client's own, as its server is down
            await ends.worker_client.close()
        own_nats.start()
        await until(lambda: ends.router_client.is_connected)
        await ends.router_client.flush()
        if dead_after_s == PATIENCE_S:
            with pytest.raises(WorkerUnreachable, match="nobody serves"):
                await ends.transport.open(ends.address, leg())
            assert reported == []
        else:
            await until(lambda: reported == [False])
