"""TLS contexts and advertised address of a process, from its settings."""

import socket
import ssl
from typing import NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import EVERY_INTERFACE, LOOPBACK
from kvrouter.settings.planes import PlaneSettings, RequestPlaneKind
from kvrouter.settings.tree import Settings


class Tls(NamedTuple):
    """TLS contexts for accepting and for making connections; None without certificates."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None


def tls_of(planes: PlaneSettings) -> Tls:
    """Load the configured certificates. Raises ConfigError that names the setting.

    TLS is mutual: a peer without a certificate of the authority is rejected in the handshake.
    """
    if planes.tls_cert is None and planes.tls_key is None:
        if planes.tls_ca is None:
            return Tls(None, None)
        return Tls(None, _context(ssl.Purpose.SERVER_AUTH, planes))
    if planes.tls_cert is None or planes.tls_key is None:
        missing = "tls_cert" if planes.tls_cert is None else "tls_key"
        raise ConfigError(f"planes.{missing}: certificate and key come together", param=missing)
    if planes.tls_ca is None:
        raise ConfigError("planes.tls_ca: is needed to know the others' certificates", param="tls_ca")
    server = _context(ssl.Purpose.CLIENT_AUTH, planes)
    server.verify_mode = ssl.CERT_REQUIRED
    return Tls(server, _context(ssl.Purpose.SERVER_AUTH, planes))


def _context(purpose: ssl.Purpose, planes: PlaneSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(purpose, cafile=planes.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"planes.tls_ca: {planes.tls_ca}: {error}", param="tls_ca") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if planes.tls_cert is not None:
        try:
            context.load_cert_chain(planes.tls_cert, planes.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"planes.tls_cert: {planes.tls_cert}: {error}", param="tls_cert") from error
    return context


def advertised(settings: Settings) -> str:
    """The host name under which others reach this process."""
    planes = settings.planes
    if planes.advertise_host is not None:
        return planes.advertise_host
    return socket.getfqdn() if planes.listen_host in EVERY_INTERFACE else planes.listen_host


def address_warnings(settings: Settings, *, in_container: bool) -> list[str]:
    """Warnings about a worker's listening addresses that are legal but probably unintended, for its start."""
    planes = settings.planes
    found = []
    if in_container and planes.request_plane is not RequestPlaneKind.NATS:
        found += loopback_warning("listen_host", "--listen-host", planes.listen_host)
    if planes.listen_host not in LOOPBACK and planes.plane_token is None and planes.tls_cert is None:
        found.append(
            f"listen_host: {planes.listen_host or 'every interface'} is open to everyone who reaches it: set "
            "KVROUTER_PLANE_TOKEN"
        )
    if planes.listen_host in EVERY_INTERFACE and advertised(settings) in LOOPBACK:
        found.append(
            f"advertise_host: routers connect to {advertised(settings)}, this host's own name for "
            "itself: other hosts need --advertise-host"
        )
    return found


def loopback_warning(name: str, flag: str, host: str) -> list[str]:
    """The warning about a process in a container that listens on ``host``, if that is a loopback address."""
    if host not in LOOPBACK:
        return []
    return [
        f"{name}: {host} inside a container is reached from this container alone: others need {flag} 0.0.0.0"
    ]
