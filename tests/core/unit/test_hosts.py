"""Hosts that others connect to, and how addresses write them."""

import socket

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import advertised_host, bracketed, is_resolvable


@pytest.mark.parametrize(
    ("host", "advertise_host"), [("0.0.0.0", None), ("::", None), ("", None), ("h", "*")]
)
def test_a_wildcard_host_cannot_be_advertised(host: str, advertise_host: str | None) -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        advertised_host(host, advertise_host)


def test_the_advertised_host_is_used_else_the_listening_host() -> None:
    assert advertised_host("0.0.0.0", "node-7") == "node-7"
    assert advertised_host("127.0.0.1", None) == "127.0.0.1"


def test_only_ipv6_addresses_are_bracketed() -> None:
    assert [bracketed("::1"), bracketed("10.0.0.1"), bracketed("node-7")] == ["[::1]", "10.0.0.1", "node-7"]


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, f"a.{'b' * 64}.c", "\u00e4" * 60])
def test_a_resolver_takes_no_empty_or_long_label(host: str) -> None:
    assert not is_resolvable(host)
    with pytest.raises(UnicodeError, match="idna"):
        socket.getaddrinfo(host, 80)


@pytest.mark.parametrize("host", ["a", "a.b.", "a" * 63, "a_b", "\u00e4.example", "::1", "fe80::1%eth0", ""])
def test_a_resolver_takes_names_and_addresses(host: str) -> None:
    assert is_resolvable(host)
