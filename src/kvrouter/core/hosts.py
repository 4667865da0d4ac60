"""Host names and addresses: loopback, IPv6 brackets."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from kvrouter.core.errors import ConfigError

EVERY_INTERFACE = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - compared with, not bound to

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

CONTAINER_MARKERS = (".dockerenv", "run/.containerenv")
"""Files that container runtimes create in the root of a container: Docker, and Podman with CRI-O."""


def advertised_host(host: str, advertise_host: str | None) -> str:
    """Return the host that peers connect to: ``advertise_host``, else the listening ``host``.

    Raises ConfigError when that is the wildcard address, to which peers cannot connect.
    """
    advertised = host if advertise_host is None else advertise_host
    if advertised in EVERY_INTERFACE:
        raise ConfigError(
            f"advertise_host: {advertised!r} is no address that others can connect to; name one",
            param="advertise_host",
        )
    return advertised


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, without brackets."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_resolvable(host: str) -> bool:
    """Whether a resolver takes ``host``, known or not: it raises UnicodeError for an empty label, and for one
    over 63 characters.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def bracketed(host: str) -> str:
    """Return ``host`` as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def in_container(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether this process runs in a container: in a pod, by its environment, or by a runtime's file."""
    return "KUBERNETES_SERVICE_HOST" in environ or any((root / each).exists() for each in CONTAINER_MARKERS)
