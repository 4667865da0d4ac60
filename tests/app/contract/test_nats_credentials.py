"""A NATS server that takes an operator's users: let in by a credentials file, which may be renewed."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.app import nats_connection as connection
from kvrouter.app.nats_connection import NatsUnreachable, nats_connection
from kvrouter.settings.planes import PlaneSettings
from kvrouter.transports.events.jetstream.stream import ComponentNames, EventStream, StreamLimits
from tests.testing.constants import SetConstants
from tests.testing.nats_jwt import Operator
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.processes import eventually

WITHIN_S = 60.0


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
def server(operator: Operator) -> Iterator[NatsServer]:
    with running_nats(more_config=operator.config) as ours:
        yield ours


async def test_only_users_of_the_nats_operator_are_admitted(
    server: NatsServer, operator: Operator, tmp_path: Path, set_constants: SetConstants
) -> None:
    file = tmp_path / "user.creds"
    operator.write_user(file)
    settings = PlaneSettings(nats_server=server.url, nats_credentials=str(file))
    async with nats_connection(settings, name="test", tls=None) as client:
        stream = EventStream(client.jetstream(), ComponentNames("default", "backend"), StreamLimits())
        assert (await stream.ensure()).messages == 0
    set_constants(connection, CONNECT_LIMIT_S=1.0)
    Operator().write_user(file)
    for stranger in (settings, PlaneSettings(nats_server=server.url)):
        with pytest.raises(NatsUnreachable, match="Authorization Violation"):
            async with nats_connection(stranger, name="test", tls=None):
                pass


async def test_expired_nats_credentials_are_read_again(
    server: NatsServer,
    operator: Operator,
    tmp_path: Path,
    set_constants: SetConstants,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_constants(connection, RECONNECT_WAIT_S=0.05)
    caplog.set_level(logging.INFO, logger="kvrouter")
    file = tmp_path / "user.creds"
    operator.write_user(file, lives_s=2)
    settings = PlaneSettings(nats_server=server.url, nats_credentials=str(file))
    async with nats_connection(settings, name="test", tls=None) as client, asyncio.timeout(WITHIN_S):

        async def is_sent_away() -> bool:
            return not client.is_connected

        async def is_back() -> bool:
            return client.is_connected

        await eventually(is_sent_away)
        operator.write_user(file)
        await eventually(is_back)
        await client.flush()
    assert "user authentication expired" in str([vars(record) for record in caplog.records])
