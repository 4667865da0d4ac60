"""A worker that is open to everybody, or that others cannot find, says so at its start."""

import socket
from pathlib import Path

import pytest
from pydantic import SecretStr

from kvrouter.app.tls import address_warnings
from kvrouter.core.hosts import CONTAINER_MARKERS, in_container
from kvrouter.settings.planes import PlaneSettings, RequestPlaneKind
from kvrouter.settings.tree import Settings


def test_default_and_well_advertised_listen_addresses_give_no_warning() -> None:
    assert address_warnings(Settings(), in_container=False) == []
    planes = PlaneSettings(listen_host="0.0.0.0", advertise_host="node-7", plane_token=SecretStr("s"))
    assert address_warnings(Settings(planes=planes), in_container=True) == []


def test_listening_on_all_interfaces_without_token_or_name_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost")
    open_to_all, nameless = address_warnings(
        Settings(planes=PlaneSettings(listen_host="0.0.0.0")), in_container=False
    )
    assert "KVROUTER_PLANE_TOKEN" in open_to_all
    assert "--advertise-host" in nameless


def test_a_worker_on_a_loopback_address_of_its_container_is_warned_of() -> None:
    (lonely,) = address_warnings(Settings(), in_container=True)
    assert "--listen-host 0.0.0.0" in lonely
    over_nats = PlaneSettings(request_plane=RequestPlaneKind.NATS)
    assert address_warnings(Settings(planes=over_nats), in_container=True) == []


@pytest.mark.parametrize("marker", CONTAINER_MARKERS)
def test_a_container_is_known_by_its_runtimes_file(marker: str, tmp_path: Path) -> None:
    assert not in_container({}, tmp_path)
    (tmp_path / marker).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / marker).touch()
    assert in_container({}, tmp_path)


def test_a_pod_is_a_container(tmp_path: Path) -> None:
    assert in_container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
