"""The ports of a worker: one that cannot be had names the flag that chooses another."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.app.worker_transports import open_worker_transports
from kvrouter.core.errors import ConfigError
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.tree import Settings


async def listen(folder: Path, port: int, **planes: str) -> None:
    chosen = {"discovery": "file", "discovery_dir": str(folder / "cards"), "listen_port": port, **planes}
    settings = Settings(planes=PlaneSettings.model_validate(chosen))
    async with open_worker_transports(
        settings, component="backend", has_local_indexer=False, publishes_kv_events=True
    ):
        pass


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on; the one below it is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port - 1)).close()
            except OSError:
                continue
            yield port
            return


@pytest.mark.parametrize("plane", ["tcp", "http"])
async def test_taken_listen_port_names_its_flag(tmp_path: Path, taken_port: int, plane: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await listen(tmp_path, taken_port, request_plane=plane)
    assert refused.value.message == (
        f"port {taken_port} on 127.0.0.1 is taken: choose another with --listen-port"
    )


async def test_taken_port_for_kv_events_names_the_listen_port_flag(tmp_path: Path, taken_port: int) -> None:
    with pytest.raises(ConfigError) as refused:
        await listen(tmp_path, taken_port - 1)
    assert "for KV events over ZeroMQ, on 127.0.0.1 is taken" in refused.value.message
    assert "--listen-port" in refused.value.message


async def test_unavailable_listen_address_names_the_listen_host_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on 192\.0\.2\.1:0: .* with --listen-host$"):
        await listen(tmp_path, 0, listen_host="192.0.2.1")


@pytest.mark.parametrize("port", [65_534, 65_535])
async def test_listen_port_without_room_above_it_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"--listen-port: at most 65533, not {port}: KV events over ZeroMQ"):
        await listen(tmp_path, port)
