"""Where a worker is reached over tcp: ``tcp://host:port/worker_id/incarnation``."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import bracketed
from kvrouter.core.ids import Epoch, WorkerId

_ID_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """One incarnation of one worker behind a listener that may serve several."""

    host: str
    port: int
    worker_id: WorkerId
    incarnation: Epoch

    def __str__(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}/{self.worker_id}/{self.incarnation}"


def read_address(address: str) -> TcpAddress:
    """Return what ``address`` names; raise ConfigError when it is none of this plane."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        worker_id, incarnation = (int(part) for part in parts.path.removeprefix("/").split("/"))
    except ValueError as error:
        raise _unreadable(address) from error
    if parts.scheme != "tcp" or not host or not port:
        raise _unreadable(address)
    if not (0 <= worker_id < _ID_LIMIT and 0 <= incarnation < _ID_LIMIT):
        raise _unreadable(address)
    return TcpAddress(host, port, WorkerId(worker_id), Epoch(incarnation))


def _unreadable(address: str) -> ConfigError:
    return ConfigError(f"address: {address!r} is not tcp://host:port/worker_id/incarnation", param="address")
