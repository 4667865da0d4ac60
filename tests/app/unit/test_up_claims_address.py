"""The front door's address: claimed before the workers start, and one clear line when it cannot be had."""

import asyncio
import socket

import pytest

from kvrouter.app.lifetime import CannotListen, claimed
from kvrouter.app.mock_fleet import MockFleet
from kvrouter.cli.up.run import embedded
from kvrouter.fleetfile.fleet_checks import default_fleet_document, load_fleet
from kvrouter.settings.tree import FrontendSettings, Settings
from tests.testing.calls import MakeFail

FLEET = load_fleet(default_fleet_document()).fleet


def settings(port: int, host: str = "127.0.0.1") -> Settings:
    return Settings(frontend=FrontendSettings(http_host=host, http_port=port))


async def test_a_taken_port_is_reported_before_any_worker_starts(make_fail: MakeFail) -> None:
    make_fail(MockFleet, "__aenter__", AssertionError("a worker was started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            async with embedded(settings(port), FLEET):
                pass
    assert caught.value.message == f"port {port} on 127.0.0.1 is taken: choose another with --http-port"


async def test_port_taken_while_workers_start_is_reported_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = MockFleet.__aenter__
    async with claimed("127.0.0.1", 0) as (other,):
        port = other.getsockname()[1]

        async def start_slowly(fleet: MockFleet) -> MockFleet:
            other.listen()
            return await start(fleet)

        monkeypatch.setattr(MockFleet, "__aenter__", start_slowly)
        with pytest.raises(CannotListen, match=f"^port {port} on 127.0.0.1 is taken"):
            async with embedded(settings(port), FLEET):
                pass
    monkeypatch.undo()
    async with embedded(settings(port), FLEET) as system:
        assert system.address == ("127.0.0.1", port)


async def test_claimed_address_refuses_connections_before_serving() -> None:
    async with claimed("127.0.0.1", 0) as (sock,):
        host, port = sock.getsockname()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
    assert sock.fileno() == -1


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_unavailable_listen_address_is_refused_with_its_flag(host: str) -> None:
    with pytest.raises(CannotListen, match=f"^cannot listen on {host}: .*: choose another .* --http-host$"):
        async with claimed(host, 0):
            pass
