"""Listening sockets with their own accept loop, and limits on unauthenticated connections.

asyncio's server accepts all waiting connections in one go. When they outnumber the free file descriptors, it
closes the rest without an answer, and a refused connection frees its descriptor only after that. This
listener decides as it accepts each connection, and answers and closes a refused one at once.
"""

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext
from typing import Generic, TypeVar

NO_DESCRIPTOR = "no file descriptor is left for another connection"

BACKLOG = 1024
"""Connections to a TcpServer that may wait to be accepted."""

REQUEST_READ_BYTES = 64 * 1024
"""Bytes that are read from a refused connection, so that closing it does not reset the answer."""

ACCEPTED_AT_ONCE = 64
"""Connections accepted in a row before the event loop runs other callbacks."""

WITHOUT_DESCRIPTORS_S = 0.2
"""How long accepting pauses when even the spare descriptor is missing."""

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_SUCH_ADDRESS = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class AcceptedSocket(socket.socket):
    """An accepted connection. Its family and type are plain attributes: the properties of its base class make
    an enumeration's member at each reading, and an event loop reads them three times.
    """

    __slots__ = ("family", "type")
    family: socket.AddressFamily
    type: socket.SocketKind

    def __init__(
        self, family: socket.AddressFamily, kind: socket.SocketKind, proto: int, fileno: int | None
    ) -> None:
        super().__init__(family, kind, proto, fileno)
        self.family, self.type = family, kind


class Listener:
    """Accepts connections on ``sock``, which it closes at the end, and hands each one to ``take``.

    When the process has no file descriptor left, the listener closes a spare one for a moment; ``answer``
    then gets the connection and must write without waiting.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[socket.socket], None],
        answer: Callable[[socket.socket], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._take = take
        self._answer = answer
        self._spare_fd = self._open_spare_fd()
        self._resuming: asyncio.TimerHandle | None = None
        self._family, self._type, self._proto = sock.family, sock.type, sock.proto
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port)."""
        name = self._sock.getsockname()
        return str(name[0]), int(name[1])

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._close_spare_fd()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock = self._accepted()
            except ConnectionAbortedError:
                continue
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
                if not self._refuse_one():
                    self._pause()
                    return
                continue
            self._take(sock)

    def _accepted(self) -> AcceptedSocket:
        """Accept one connection. Raises OSError."""
        # accept() would make a socket of the base class
        descriptor, _ = self._sock._accept()  # type: ignore[attr-defined]
        sock = AcceptedSocket(self._family, self._type, self._proto, descriptor)
        sock.setblocking(False)
        return sock

    def _refuse_one(self) -> bool:
        """Answer one connection with the spare descriptor; return False when there is no descriptor."""
        if self._spare_fd is None:
            self._spare_fd = self._open_spare_fd()
            return self._spare_fd is not None
        self._close_spare_fd()
        try:
            sock = self._accepted()
        except OSError as error:
            return error.errno not in _NONE_LEFT
        else:
            self._answer(sock)
            return True
        finally:
            self._spare_fd = self._open_spare_fd()

    def _pause(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._resuming = self._loop.call_later(
            WITHOUT_DESCRIPTORS_S, self._loop.add_reader, self._sock.fileno(), self._accept
        )

    def _open_spare_fd(self) -> int | None:
        with contextlib.suppress(OSError):
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _close_spare_fd(self) -> None:
        if self._spare_fd is not None:
            os.close(self._spare_fd)
            self._spare_fd = None


HELLO_WITHIN_S = 5.0
"""How long a connection may take to send the token."""

ROUTERS_MAX = 1024
"""Routers that may be connected to one listener."""

UNAUTHENTICATED_MAX = 128
"""Connections of one listener that may lack the token: with it, authentication takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """The limits of one listener.

    ``connections_max`` limits authenticated connections. An unauthenticated connection has
    ``hello_within_s``; there are at most ``unauthenticated_max``, and one more drops the oldest, so that
    peers without the token cannot keep others out. Connections do not use file descriptors from the number
    ``descriptors_max`` on.
    """

    connections_max: int = ROUTERS_MAX
    unauthenticated_max: int = UNAUTHENTICATED_MAX
    hello_within_s: float = HELLO_WITHIN_S
    descriptors_max: int = sys.maxsize


LISTENER_LIMITS = ListenerLimits()
"""The default limits of a listener."""


class TcpServer:
    """Listens on a port and makes a protocol for each connection, as a server of ``loop.create_server`` does.

    When ``limits`` or the process have no descriptor left, a connection gets ``answer()`` and is closed, and
    ``on_refused`` is called with the reason. Under ``ssl`` it is closed without an answer, because nothing
    can be sent before the handshake, which must end within ``hello_within_s``.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        answer: Callable[[], bytes],
        on_refused: Callable[[str], None],
        ssl: SSLContext | None = None,
        limits: ListenerLimits = LISTENER_LIMITS,
    ) -> None:
        self._factory = factory
        self._answer = answer
        self._on_refused = on_refused
        self._ssl = ssl
        self._handshake_timeout_s = None if ssl is None else limits.hello_within_s
        self._descriptors_max = limits.descriptors_max
        self._listeners: list[Listener] = []
        self._arriving: set[asyncio.Task[object]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen on every address of ``host``; return the port. Raises OSError."""
        loop = self._loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        failed: OSError | None = None
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sock = socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                failed = error
                if error.errno in _NO_SUCH_ADDRESS:
                    continue
                self.close()
                raise
            self._listeners.append(Listener(sock, loop=loop, take=self._take, answer=self._refuse))
        if not self._listeners:
            raise failed or OSError(errno.EADDRNOTAVAIL, f"{host!r} has no address")
        return self._listeners[0].address[1]

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for listener in self._listeners:
            listener.close()

    async def wait_closed(self) -> None:
        """Return when every accepted connection has its protocol; cancel unfinished handshakes."""
        if self._ssl is not None:
            for task in self._arriving:
                task.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)

    def _take(self, sock: socket.socket) -> None:
        if sock.fileno() >= self._descriptors_max:
            self._refuse(sock)
            return
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(
                self._factory, sock, ssl=self._ssl, ssl_handshake_timeout=self._handshake_timeout_s
            )
        )
        self._arriving.add(task)
        task.add_done_callback(partial(self._arrived, sock))

    def _arrived(self, sock: socket.socket, task: "asyncio.Task[object]") -> None:
        self._arriving.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            sock.close()
        if error is not None and not isinstance(
            error, OSError
        ):  # else the peer left, or failed its handshake
            self._loop.call_exception_handler(
                {"message": "a connection could not be served", "exception": error, "task": task}
            )

    def _refuse(self, sock: socket.socket) -> None:
        self._on_refused(NO_DESCRIPTOR)
        with sock, contextlib.suppress(OSError):
            if self._ssl is None:
                sock.send(self._answer())
            sock.shutdown(socket.SHUT_WR)
            sock.recv(REQUEST_READ_BYTES)


T = TypeVar("T")


class Connections(Generic[T]):
    """The connections of a listener. Unauthenticated ones are kept in the order of their arrival; ``drop``
    ends one, and ``on_dropped`` is called with the reason.
    """

    def __init__(
        self, drop: Callable[[T], None], *, limits: ListenerLimits, on_dropped: Callable[[str], None]
    ) -> None:
        self._drop = drop
        self._limits = limits
        self._on_dropped = on_dropped
        self._since_s: dict[T, float] = {}
        self._known: set[T] = set()

    def add(self, connection: T, *, now_s: float) -> None:
        """Add a connection; of too many unauthenticated ones, drop the oldest."""
        self._since_s[connection] = now_s
        if len(self._since_s) > self._limits.unauthenticated_max:
            oldest = next(iter(self._since_s))
            del self._since_s[oldest]
            self._on_dropped(
                f"{self._limits.unauthenticated_max} connections have not said who they are: "
                "the oldest are dropped"
            )
            self._drop(oldest)

    def admit(self, connection: T) -> bool:
        """Mark the connection as authenticated; return whether there is room for it. Idempotent.

        A connection without room stays unauthenticated: it is closed when its time is over.
        """
        if connection not in self._known and len(self._known) >= self._limits.connections_max:
            return False
        self._since_s.pop(connection, None)
        self._known.add(connection)
        return True

    def discard(self, connection: T) -> None:
        """Forget a closed connection."""
        self._since_s.pop(connection, None)
        self._known.discard(connection)

    def older_than(self, then_s: float) -> list[T]:
        """Return the unauthenticated connections that were added before ``then_s``."""
        return [connection for connection, since_s in self._since_s.items() if since_s < then_s]
