"""Three real nats-servers that are one: JetStream keeps what it was given while two of them live."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamInfo

from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually, free_ports

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
