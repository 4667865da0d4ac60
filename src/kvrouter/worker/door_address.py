"""Where a door is: ``unix:/path`` or ``tcp://host:port``."""

import ipaddress
import os
import socket
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import bracketed

_UNIX, _TCP = "unix:", "tcp://"
_PORTS = 65536


@dataclass(frozen=True, slots=True)
class DoorAddress:
    """A socket file, or a host and its port; port 0 is any free one."""

    path: str | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "DoorAddress":
        """Read an address. Raises ConfigError."""
        if text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if path.startswith("/"):
                return cls(path=path)
        elif text.startswith(_TCP):
            host, _, port = text.removeprefix(_TCP).rpartition(":")
            if host and port.isdecimal() and int(port) < _PORTS:
                return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))
        raise ConfigError(f"address: {text!r} is neither unix:/path nor tcp://host:port", param="address")

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"{_TCP}{bracketed(self.host)}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether only this host's own processes can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """Return a socket that is bound here. A socket file is for this user alone; one that nobody
        listens at any more is replaced. Raises ConfigError."""
        try:
            if self.path is None:
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                return socket.create_server((self.host, self.port), family=family)
            return self._listen_at(self.path)
        except OSError as error:
            raise ConfigError(
                f"address: cannot listen at {self}: {error.strerror or error}", param="address"
            ) from error

    def bound_to(self, sock: socket.socket) -> "DoorAddress":
        """The same place with the port that was found."""
        return self if self.path is not None else DoorAddress(host=self.host, port=sock.getsockname()[1])

    def forget(self) -> None:
        """Remove the socket file."""
        if self.path is not None:
            with suppress(FileNotFoundError):
                Path(self.path).unlink()

    def _listen_at(self, path: str) -> socket.socket:
        self._remove_leftover(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        except OSError:
            sock.close()
            raise
        finally:
            os.umask(before)
        return sock

    def _remove_leftover(self, path: str) -> None:
        if not Path(path).is_socket():
            return
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as knock:
            try:
                knock.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()
                return
        raise ConfigError(f"address: somebody listens at {self} already", param="address")
