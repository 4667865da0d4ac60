"""The front door's address: claimed before anything else starts, so that a taken port costs nothing."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvrouter.core.errors import KvrouterError


class CannotListen(KvrouterError):
    """The address of the settings cannot be had; the message says which setting to change."""

    code = "cannot_listen"


@asynccontextmanager
async def claimed(host: str, port: int) -> AsyncIterator[list[socket.socket]]:
    """Sockets bound to each address of ``host`` (port 0: any free one), closed at the end.

    They do not listen yet: who knocks before somebody serves is turned away at once. Raises CannotListen.
    """
    sockets: list[socket.socket] = []
    try:
        with explained(host, port):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, protocol, _, address in dict.fromkeys(found):
                sock = socket.socket(family, kind, protocol)
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


@contextmanager
def explained(host: str, port: int) -> Iterator[None]:
    """Turn the system's refusal of an address into a CannotListen."""
    try:
        yield
    except OSError as error:
        raise CannotListen(_why(host, port, error)) from error


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken: choose another with --http-port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not for this user: choose another with --http-port"
    return f"cannot listen on {host}: {error.strerror or error}: choose another address with --http-host"
