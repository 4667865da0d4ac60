"""A NATS cluster of three servers: it loses its leaders one after the other, and then most of its servers."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kvrouter.transports.events.jetstream.stream import ComponentNames
from tests.testing.fleet_processes import FleetProcesses
from tests.testing.nats_cluster import SERVERS, NatsCluster, cluster_of, cluster_servers
from tests.testing.processes import Frontend, eventually, fleet
from tests.testing.streaming_client import StreamingClient

FLEET = "version: 1\nmodels: [{name: mock}]\nworkers: [{name: w, replicas: 2}]\nspeedup: 20\n"
ANSWER_TOKENS = 8
RECOVERS_WITHIN_S = 120.0
"""Servers on a busy machine take their time to agree on a leader."""


@pytest.fixture
async def cluster() -> AsyncIterator[NatsCluster]:
    with cluster_servers() as servers:
        ours = await cluster_of(servers)
        yield ours
        await ours.close()


async def is_frozen(frontend: Frontend) -> bool:
    return not (await frontend.fleet())["discovery"]["reachable"]


async def ask(frontend: Frontend, asked: list[list[int]]) -> None:
    client = await StreamingClient(frontend, max_tokens=ANSWER_TOKENS).end()
    assert client.is_whole, client.error
    asked.append(client.prompt)


async def test_the_fleet_survives_one_lost_nats_server_and_freezes_without_most(
    cluster: NatsCluster, record_property: Callable[[str, object], None]
) -> None:
    settings = {
        "NATS_SERVER": cluster.url,
        "KVROUTER_NATS_REPLICAS": str(SERVERS),
        "DYN_DISCOVERY_BACKEND": "nats",
        "DYN_EVENT_PLANE": "jetstream",
        "DYN_ROUTER_REPLICA_SYNC": "true",
        "KVROUTER_LEASE_S": "6",
    }
    loop = asyncio.get_running_loop()
    asked: list[list[int]] = []
    async with fleet(settings) as processes:
        ours = await FleetProcesses.begin(processes, FLEET)
        events = ComponentNames(processes.namespace, "backend").stream
        cards = f"KV_kvrouter-{processes.namespace}-workers"

        async def is_complete() -> bool:
            return all([await cluster.copies_of(stream) == SERVERS for stream in (events, cards)])

        for stream in (events, cards):
            await eventually(is_complete, limit_s=RECOVERS_WITHIN_S)
            leader = await cluster.leader_of(stream)
            assert leader is not None
            leader.kill()
            killed_s = loop.time()
            for frontend in ours.frontends:
                await ask(frontend, asked)
            await ours.is_well(asked, limit_s=RECOVERS_WITHIN_S)
            record_property(f"without the leader of {stream}: well after s", round(loop.time() - killed_s, 2))
            leader.start()

        await eventually(is_complete, limit_s=RECOVERS_WITHIN_S)
        for server in cluster.servers[1:]:
            server.kill()
        killed_s = loop.time()
        for frontend in ours.frontends:
            await eventually(lambda here=frontend: is_frozen(here), limit_s=RECOVERS_WITHIN_S)
            await ask(frontend, asked)
            assert "worker_lapsed" not in frontend.lines(), "nobody could renew: nobody's lease has run out"
        record_property("without most servers: frozen after s", round(loop.time() - killed_s, 2))
        for server in cluster.servers[1:]:
            server.start()
        back_s = loop.time()
        await ours.is_well(asked, limit_s=RECOVERS_WITHIN_S)
        record_property("all servers back: well after s", round(loop.time() - back_s, 2))
        for frontend in ours.frontends:
            await eventually(lambda here=frontend: is_thawed(here))
            assert "worker_left" not in frontend.lines()


async def is_thawed(frontend: Frontend) -> bool:
    return not await is_frozen(frontend)
