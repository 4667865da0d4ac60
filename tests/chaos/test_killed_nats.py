"""A nats-server that is killed in mid-work, and comes back with its store or with an empty one."""

import asyncio
import shutil
from collections.abc import Callable

import pytest

from tests.support.clients import Client
from tests.support.file_fleet import FileFleet
from tests.support.moments import ANSWER_TOKENS, Moment, meet, slow_fleet
from tests.support.nats_server import NatsServer
from tests.support.processes import Frontend, eventually, fleet

PLANES = [
    pytest.param({}, (), id="jetstream"),
    pytest.param({}, ("--enable-local-indexer",), id="core"),
]


async def is_frozen(frontend: Frontend) -> bool:
    return not (await frontend.fleet())["discovery"]["reachable"]


@pytest.mark.parametrize(("environ", "flags"), PLANES)
async def test_answers_over_tcp_go_on_while_nats_is_away(
    environ: dict[str, str],
    flags: tuple[str, ...],
    own_nats: NatsServer,
    record_property: Callable[[str, object], None],
) -> None:
    settings = {
        "NATS_SERVER": own_nats.url,
        "DYN_DISCOVERY_BACKEND": "nats",
        "DYN_ROUTER_REPLICA_SYNC": "true",
        "KVROUTER_LEASE_S": "3",
        **environ,
    }
    async with fleet(settings) as processes:
        slow = await FileFleet.begin(processes, slow_fleet(), flags=flags)
        loop = asyncio.get_running_loop()
        asked: list[list[int]] = []
        for moment in Moment:
            client = await meet(moment, slow.frontends[0])
            own_nats.kill()
            killed_s = loop.time()
            asked.append(client.prompt)
            assert (await client.end()).is_whole, f"{moment}: {client.error}"
            for frontend in slow.frontends:
                await eventually(lambda here=frontend: is_frozen(here))
            record_property(f"{moment}: frozen after s", round(loop.time() - killed_s, 2))
            later = await Client(slow.frontends[1], max_tokens=ANSWER_TOKENS).end()
            assert later.is_whole, later.error
            asked.append(later.prompt)
            if moment is Moment.STREAM:
                shutil.rmtree(own_nats.folder / "store")
            own_nats.start()
            back_s = loop.time()
            await slow.is_well(asked)
            record_property(f"{moment}: well after s", round(loop.time() - back_s, 2))


async def test_a_request_over_nats_ends_when_nats_dies_and_later_ones_are_served(
    own_nats: NatsServer,
) -> None:
    settings = {
        "NATS_SERVER": own_nats.url,
        "DYN_DISCOVERY_BACKEND": "nats",
        "DYN_REQUEST_PLANE": "nats",
        "KVROUTER_LEASE_S": "3",
    }
    async with fleet(settings) as processes:
        slow = await FileFleet.begin(processes, slow_fleet(), flags=("--enable-local-indexer",))
        asked: list[list[int]] = []
        for moment in Moment:
            client = await meet(moment, slow.frontends[0])
            own_nats.kill()
            await client.end()
            assert client.is_whole or client.error is not None
            print(moment, client.error)
            own_nats.start()
            await slow.is_well()
            later = await Client(slow.frontends[1], max_tokens=ANSWER_TOKENS).end()
            assert later.is_whole, later.error
            asked.append(later.prompt)
            await slow.is_well(asked)
