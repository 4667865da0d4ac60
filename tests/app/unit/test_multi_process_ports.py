"""What ``kvrouter up`` with processes looks at before any starts: the ports of frontends, the NATS server."""

import socket

import pytest

from kvrouter.app.lifetime import CannotListen
from kvrouter.cli import main
from kvrouter.cli.up.multi_process import free_ports
from kvrouter.core.errors import ConfigError
from tests.testing.processes import free_ports as some_free_ports


async def test_free_ports_are_consecutive_from_the_first() -> None:
    first = some_free_ports(3)
    assert await free_ports("127.0.0.1", first, 3) == [first, first + 1, first + 2]


async def test_a_taken_port_is_named() -> None:
    first = some_free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        with pytest.raises(CannotListen, match=str(first + 1)):
            await free_ports("127.0.0.1", first, 2)


@pytest.mark.parametrize(("first", "n"), [(0, 1), (0, 2), (65535, 2)])
async def test_impossible_port_ranges_are_refused(first: int, n: int) -> None:
    with pytest.raises(ConfigError, match="http-port"):
        await free_ports("127.0.0.1", first, n)


def test_a_nats_server_whose_host_no_resolver_takes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    port = some_free_ports(1)
    assert main(["up", "--nats", "--http-port", str(port), "--nats-server", "nats://a..b"]) == 2
    shown = capsys.readouterr().err
    assert "planes.nats_server: nats://a..b: its host must have 1 to 63 characters between dots" in shown
