"""A nats-server that is killed in mid-work, and comes back with its store or with an empty one."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.testing.fleet_processes import (
    NATS_NATS_CORE,
    NATS_TCP_JETSTREAM_SYNC,
    FleetTransports,
    fleet_processes,
)
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually
from tests.testing.request_phases import ANSWER_TOKENS, RequestPhase, slow_fleet, wait_for_phase
from tests.testing.streaming_client import StreamingClient

PLANES = [
    NATS_TCP_JETSTREAM_SYNC,
    replace(NATS_TCP_JETSTREAM_SYNC, name="nats-tcp-core-sync", flags=("--enable-local-indexer",)),
]


async def is_frozen(frontend: Frontend) -> bool:
    return not (await frontend.fleet())["discovery"]["reachable"]


@pytest.mark.parametrize("planes", PLANES, ids=str)
async def test_answers_over_tcp_continue_while_nats_is_down(
    planes: FleetTransports, own_nats: NatsServer, record_property: Callable[[str, object], None]
) -> None:
    async with fleet_processes(slow_fleet(), planes, own_nats) as slow:
        loop = asyncio.get_running_loop()
        asked: list[list[int]] = []
        for moment in RequestPhase:
            client = await wait_for_phase(moment, slow.frontends[0])
            own_nats.kill()
            killed_s = loop.time()
            asked.append(client.prompt)
            assert (await client.end()).is_whole, f"{moment}: {client.error}"
            for frontend in slow.frontends:
                await eventually(lambda here=frontend: is_frozen(here))
            record_property(f"{moment}: frozen after s", round(loop.time() - killed_s, 2))
            later = await StreamingClient(slow.frontends[1], max_tokens=ANSWER_TOKENS).end()
            assert later.is_whole, later.error
            asked.append(later.prompt)
            if moment is RequestPhase.STREAM:
                shutil.rmtree(own_nats.folder / "store")
            own_nats.start()
            back_s = loop.time()
            await slow.is_well(asked)
            record_property(f"{moment}: well after s", round(loop.time() - back_s, 2))
        own_nats.kill()
        for frontend in slow.frontends:
            await eventually(lambda here=frontend: is_frozen(here))
        for each in (*slow.frontends, *slow.workers.values()):
            assert await each.stop() == 0, f"{each.name} ends in good order also then"


@pytest.mark.parametrize(
    ("dead_after_s", "stays_away"), [(5, True), (20, False)], ids=["stays-away", "is-back-at-once"]
)
async def test_requests_over_nats_survive_a_short_outage_and_fail_in_a_long_one(
    dead_after_s: int, stays_away: bool, own_nats: NatsServer, record_property: Callable[[str, object], None]
) -> None:
    timeouts = {"KVROUTER_DEAD_AFTER_S": str(dead_after_s)}
    async with fleet_processes(slow_fleet(), NATS_NATS_CORE, own_nats, environ=timeouts) as slow:
        loop = asyncio.get_running_loop()
        asked: list[list[int]] = []
        for moment in RequestPhase:
            client = await wait_for_phase(moment, slow.frontends[0])
            own_nats.kill()
            killed_s = loop.time()
            if not stays_away:
                own_nats.start()
            await client.end()
            record_property(f"{moment}: ended after s", round(loop.time() - killed_s, 2))
            if stays_away:
                assert client.error is not None, "nobody could answer"
                own_nats.start()
            else:
                assert client.is_whole, client.error
            await slow.is_well()
            later = await StreamingClient(slow.frontends[1], max_tokens=ANSWER_TOKENS).end()
            assert later.is_whole, later.error
            asked.append(later.prompt)
            await slow.is_well(asked)
