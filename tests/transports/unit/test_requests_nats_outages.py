"""The request plane over NATS while the server is away, and when it is back."""

import asyncio
from contextlib import suppress

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from tests.testing.lossy_nats import PATIENCE_S, lossy_nats
from tests.testing.nats_server import NatsServer
from tests.testing.scripted_worker import IN_TIME_S, accepted, leg, read_all
from tests.testing.waits import until


async def test_stream_survives_an_outage_that_loses_no_message(own_nats: NatsServer) -> None:
    async with lossy_nats(own_nats) as harness:
        reported: list[bool] = []
        harness.transport.follow(harness.address, reported.append)
        stream = await accepted(harness.transport, harness.address, leg())
        await harness.worker.streams[0].put(EngineChunk(token_ids=(1,)))
        assert (await stream.__anext__()).token_ids == (1,)
        own_nats.kill()
        await until(lambda: not (harness.router_client.is_connected or harness.worker_client.is_connected))
        own_nats.start()
        await until(lambda: harness.router_client.is_connected and harness.worker_client.is_connected)
        await harness.router_client.flush()  # it is connected a moment before it listens again
        await harness.worker.streams[0].put(EngineChunk(token_ids=(2,), finish=FinishReason.STOP))
        assert (await read_all(stream))[0] == [2]
        await accepted(harness.transport, harness.address, leg("after"))


async def test_long_outage_breaks_streams_and_reports_no_worker_death(
    own_nats: NatsServer,
) -> None:
    async with lossy_nats(own_nats, dead_after_s=0.5, open_timeout_s=0.5) as harness:
        reported: list[bool] = []
        harness.transport.follow(harness.address, reported.append)
        stream = await accepted(harness.transport, harness.address, leg())
        own_nats.kill()
        with pytest.raises(StreamBroken, match="nothing was heard"):
            await read_all(stream)
        assert await harness.place.wait_idle(IN_TIME_S)
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable):
                await accepted(harness.transport, harness.address, leg("y"))
        assert reported == []


async def test_opening_a_leg_fails_while_nats_is_down(own_nats: NatsServer) -> None:
    async with lossy_nats(own_nats, open_timeout_s=1000.0) as harness:
        harness.worker_client.loses = lambda _subject, _message: True
        waits = asyncio.create_task(accepted(harness.transport, harness.address, leg()))
        await until(lambda: bool(harness.worker.requests))
        own_nats.kill()
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(WorkerUnreachable, match="the connection to NATS is down"):
                await waits
            harness.router_client.loses = lambda _subject, _message: True
            for _ in range(3):
                with pytest.raises(WorkerUnreachable, match="the connection to NATS is down"):
                    await accepted(harness.transport, harness.address, leg("y"))
        assert harness.router_client.n_lost == 0
        own_nats.start()
        await until(lambda: harness.router_client.is_connected and harness.worker_client.is_connected)


async def test_worker_followed_during_an_outage_is_reachable_afterwards(
    own_nats: NatsServer,
) -> None:
    async with lossy_nats(own_nats) as harness:
        own_nats.kill()
        await until(lambda: not harness.router_client.is_connected)
        harness.transport.follow(harness.address, lambda _is_alive: None)
        own_nats.start()
        await until(lambda: harness.router_client.is_connected and harness.worker_client.is_connected)
        await harness.worker_client.flush()
        await accepted(harness.transport, harness.address, leg())


@pytest.mark.parametrize("dead_after_s", [PATIENCE_S, 0.5])
async def test_absent_worker_is_reported_lost_only_some_time_after_an_outage(
    own_nats: NatsServer, dead_after_s: float
) -> None:
    async with lossy_nats(own_nats, dead_after_s=dead_after_s) as harness:
        reported: list[bool] = []
        harness.transport.follow(harness.address, reported.append)
        own_nats.kill()
        await until(lambda: not harness.router_client.is_connected)
        with suppress(OSError):  # the client's own, as its server is down
            await harness.worker_client.close()
        own_nats.start()
        await until(lambda: harness.router_client.is_connected)
        await harness.router_client.flush()
        if dead_after_s == PATIENCE_S:
            with pytest.raises(WorkerUnreachable, match="nobody serves"):
                await accepted(harness.transport, harness.address, leg())
            assert reported == []
        else:
            await until(lambda: reported == [False])
