"""A worker that is open to everybody, or that others cannot find, says so at its start."""

import socket

import pytest
from pydantic import SecretStr

from kvrouter.app.tls import address_warnings
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.tree import Settings


def test_the_defaults_and_a_worker_that_others_find_are_beyond_doubt() -> None:
    assert address_warnings(Settings()) == []
    planes = PlaneSettings(listen_host="0.0.0.0", advertise_host="node-7", plane_token=SecretStr("s"))
    assert address_warnings(Settings(planes=planes)) == []


def test_every_interface_without_a_token_and_a_name_is_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost")
    open_to_all, nameless = address_warnings(Settings(planes=PlaneSettings(listen_host="0.0.0.0")))
    assert "KVROUTER_PLANE_TOKEN" in open_to_all
    assert "--advertise-host" in nameless
