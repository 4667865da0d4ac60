"""The server that tests of NATS start, and the ports of servers in tests."""

import asyncio
from pathlib import Path

import nats
import pytest

from tests.testing import processes
from tests.testing.constants import SetConstants
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.processes import not_ephemeral


async def test_a_stream_outlives_a_kill_and_a_restart(own_nats: NatsServer) -> None:
    url = own_nats.url
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="s", subjects=["s.>"])
    await stream.publish("s.x", b"1")
    await client.close()
    own_nats.restart()
    assert own_nats.url == url
    client = await nats.connect(url)
    assert (await client.jetstream().stream_info("s")).state.messages == 1
    await client.close()


async def test_a_server_with_a_token_refuses_clients_without_it() -> None:
    with running_nats(token="t0p") as server:
        client = await nats.connect(server.url)
        await client.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"CONNECT {}\r\nPING\r\n")
        assert (await reader.readline()).startswith(b"INFO")
        assert b"Authorization Violation" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_the_shared_server_answers(shared_nats: NatsServer) -> None:
    client = await nats.connect(shared_nats.url)
    assert client.is_connected
    await client.close()


@pytest.mark.parametrize(
    ("ephemeral", "ports"),
    [
        ("32768\t60999\n", [10, 11, 12, 13, 14, 15]),
        ("12\t60999\n", [10]),
        ("11\t12\n", [13, 14, 15]),
        ("1\t65535\n", [10, 11, 12, 13, 14, 15]),
    ],
)
def test_ports_of_servers_are_not_ephemeral_where_others_are_left(
    ephemeral: str, ports: list[int], tmp_path: Path, set_constants: SetConstants
) -> None:
    file = tmp_path / "ip_local_port_range"
    file.write_text(ephemeral)
    set_constants(processes, EPHEMERAL_PORTS=file)
    assert [*not_ephemeral(range(10, 16), 2)] == ports
