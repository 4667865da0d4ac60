"""A worker that is open to everybody, or that others cannot find, says so at its start."""

import socket

import pytest
from pydantic import SecretStr

from kvrouter.app.tls import address_warnings
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.tree import Settings


def test_default_and_well_advertised_listen_addresses_give_no_warning() -> None:
    assert address_warnings(Settings()) == []
    planes = PlaneSettings(listen_host="0.0.0.0", advertise_host="node-7", plane_token=SecretStr("s"))
    assert address_warnings(Settings(planes=planes)) == []


def test_listening_on_all_interfaces_without_token_or_name_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost")
    open_to_all, nameless = address_warnings(Settings(planes=PlaneSettings(listen_host="0.0.0.0")))
    assert "KVROUTER_PLANE_TOKEN" in open_to_all
    assert "--advertise-host" in nameless
