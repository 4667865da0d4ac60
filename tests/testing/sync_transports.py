"""Both sync transports: in memory, and over a real nats-server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import nats
import pytest
from nats.aio.client import Client

from kvrouter.transports.sync.nats import NatsSyncTransport
from kvrouter.transports.sync.port import SyncTransport
from tests.oracles.sync import MemorySyncTransport
from tests.testing.nats_server import NatsServer

MakeTransport = Callable[[], Awaitable[SyncTransport]]


@pytest.fixture(params=["memory", "nats"])
async def make_transport(request: pytest.FixtureRequest) -> AsyncIterator[MakeTransport]:
    clients: list[Client] = []
    shared = MemorySyncTransport()
    namespace = f"ns-{uuid4().hex}"

    async def make() -> SyncTransport:
        if request.param == "memory":
            return shared
        server: NatsServer = request.getfixturevalue("shared_nats")
        clients.append(await nats.connect(server.url))
        return NatsSyncTransport(clients[-1], namespace=namespace, token="secret")

    yield make
    for client in clients:
        await client.close()
