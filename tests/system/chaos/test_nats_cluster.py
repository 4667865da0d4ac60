"""A NATS cluster of three servers: it loses its leaders one after the other, and then most of its servers."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamInfo

from kvrouter.transports.events.jetstream.stream import ComponentNames
from tests.testing.fleet_processes import FleetProcesses
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, fleet, free_ports
from tests.testing.streaming_client import StreamingClient

FLEET = "version: 1\nmodels: [{name: mock}]\nworkers: [{name: w, replicas: 2}]\nspeedup: 20\n"
ANSWER_TOKENS = 8
SERVERS = 3
ANSWER_S = 2.0


class NatsCluster:
    """The servers, and a client that asks them how things stand."""

    def __init__(self, servers: Sequence[NatsServer], client: Client) -> None:
        self.servers = servers
        self._client = client
        self._jetstream = client.jetstream(timeout=ANSWER_S)

    @property
    def url(self) -> str:
        return _url(self.servers)

    async def is_up(self) -> bool:
        """Whether JetStream answers."""
        try:
            await self._jetstream.account_info()
        except (NatsError, OSError):
            return False
        return True

    async def leader_of(self, stream: str) -> NatsServer | None:
        """Who leads a stream now; None while nobody does."""
        info = await self._info(stream)
        name = None if info is None or info.cluster is None else info.cluster.leader
        return next((server for server in self.servers if server.name == name), None)

    async def copies_of(self, stream: str) -> int:
        """How many servers have the whole stream now."""
        info = await self._info(stream)
        if info is None or info.cluster is None or info.cluster.leader is None:
            return 0
        return 1 + sum(bool(peer.current) for peer in info.cluster.replicas or ())

    async def _info(self, stream: str) -> StreamInfo | None:
        try:
            return await self._jetstream.stream_info(stream)
        except (NatsError, OSError):
            return None

    async def close(self) -> None:
        await self._client.close()


@contextmanager
def cluster_servers() -> Iterator[Sequence[NatsServer]]:
    """Three servers that know each other, and run; at the end they are killed and their stores removed."""
    folder = Path(tempfile.mkdtemp(prefix="kvrouter-nats-"))
    first = free_ports(SERVERS)
    routes = ", ".join(f'"nats://127.0.0.1:{first + each}"' for each in range(SERVERS))
    servers = []
    try:
        for each in range(SERVERS):
            home = folder / str(each)
            home.mkdir()
            config = f'cluster {{ name: test, listen: "127.0.0.1:{first + each}", routes: [{routes}] }}'
            servers.append(NatsServer(home, more_config=config))
            servers[-1].start()
        yield servers
    finally:
        for server in servers:
            server.kill()
        shutil.rmtree(folder)


async def cluster_of(servers: Sequence[NatsServer]) -> NatsCluster:
    """Ask the servers until they have agreed on a leader. Close what is returned."""

    async def ignore(_error: Exception) -> None:
        """A test that kills a server knows that it is gone."""

    client = await nats.connect(
        _url(servers).split(","), error_cb=ignore, max_reconnect_attempts=-1, reconnect_time_wait=1
    )
    cluster = NatsCluster(servers, client)
    await eventually(cluster.is_up)
    return cluster


def _url(servers: Sequence[NatsServer]) -> str:
    return ",".join(server.url for server in servers)


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
        "KVROUTER_LEASE_S": "15",
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
            await eventually(is_complete)
            leader = await cluster.leader_of(stream)
            assert leader is not None
            leader.kill()
            killed_s = loop.time()
            for frontend in ours.frontends:
                await ask(frontend, asked)
            await ours.is_well(asked)
            record_property(f"without the leader of {stream}: well after s", round(loop.time() - killed_s, 2))
            leader.start()

        await eventually(is_complete)
        for server in cluster.servers[1:]:
            server.kill()
        killed_s = loop.time()
        for frontend in ours.frontends:
            await eventually(lambda here=frontend: is_frozen(here))
            await ask(frontend, asked)
            assert "worker_lapsed" not in frontend.lines(), "nobody could renew: nobody's lease has run out"
        record_property("without most servers: frozen after s", round(loop.time() - killed_s, 2))
        for server in cluster.servers[1:]:
            server.start()
        back_s = loop.time()
        await ours.is_well(asked)
        record_property("all servers back: well after s", round(loop.time() - back_s, 2))
        for frontend in ours.frontends:
            await eventually(lambda here=frontend: is_thawed(here))
            assert "worker_left" not in frontend.lines()


async def is_thawed(frontend: Frontend) -> bool:
    return not await is_frozen(frontend)
