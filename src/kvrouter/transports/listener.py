"""Listening sockets with an accept loop of their own, and bounds on unauthenticated connections.

An event loop's own server takes whatever waits in one go. When that is more than there are file descriptors,
it closes the rest unheard: a connection that was refused gives its descriptor back only after that. Here each
connection is judged as it is accepted, and one that is refused is answered and closed on the spot.
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
"""What is read of a refused connection, so that closing it does not reset the answer."""

ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before everything else on the event loop gets its turn."""

WITHOUT_DESCRIPTORS_S = 0.2
"""How long accepting rests when the last descriptor cannot be had either."""

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_SUCH_ADDRESS = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class Listener:
    """Accepts on ``sock``, which is closed at the end, and hands each connection to ``take``.

    When the process has no file descriptor left, one that is kept for this is given up for a moment, and
    ``answer`` gets the connection, to write what it must without waiting.
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
        self._kept = self._keep()
        self._resting: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port)."""
        name = self._sock.getsockname()
        return str(name[0]), int(name[1])

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._give_up_kept()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
                if not self._turn_one_away():
                    self._rest()
                    return
                continue
            sock.setblocking(False)
            self._take(sock)

    def _turn_one_away(self) -> bool:
        """Answer one connection under the descriptor that is kept; False when there is none."""
        if self._kept is None:
            self._kept = self._keep()
            return self._kept is not None
        self._give_up_kept()
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            return error.errno not in _NONE_LEFT
        else:
            sock.setblocking(False)
            self._answer(sock)
            return True
        finally:
            self._kept = self._keep()

    def _rest(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._resting = self._loop.call_later(
            WITHOUT_DESCRIPTORS_S, self._loop.add_reader, self._sock.fileno(), self._accept
        )

    def _keep(self) -> int | None:
        with contextlib.suppress(OSError):
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _give_up_kept(self) -> None:
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None


HELLO_WITHIN_S = 5.0
"""How long a connection has to show the token."""

ROUTERS_MAX = 1024
"""Routers that may be connected to one listener."""

UNAUTHENTICATED_MAX = 128
"""How many connections of a listener may not have shown the token yet: with it that takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """What a listener keeps to.

    Of connections that showed the token there are ``connections_max``. One that did not has
    ``hello_within_s`` for it; of these there are ``unauthenticated_max``: where one more comes the oldest is
    dropped, so that nobody without the token keeps others out. File descriptors from the number
    ``descriptors_max`` on are not for connections.
    """

    connections_max: int = ROUTERS_MAX
    unauthenticated_max: int = UNAUTHENTICATED_MAX
    hello_within_s: float = HELLO_WITHIN_S
    descriptors_max: int = sys.maxsize


LISTENER_LIMITS = ListenerLimits()
"""What a listener keeps to where nothing else is said."""


class TcpServer:
    """Listens on a port and makes a protocol for each connection, as a server of ``loop.create_server`` does.

    A connection for which ``limits`` have no descriptor, or that comes when none is left, gets ``answer()``
    and is closed, and ``on_refused`` is given the reason. Under ``ssl`` it is closed without an answer:
    nothing can be said before a handshake, which has ``hello_within_s``.
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
        """Listen no more. Idempotent."""
        for listener in self._listeners:
            listener.close()

    async def wait_closed(self) -> None:
        """Return when no connection is on its way to its protocol; handshakes are given up."""
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
    """The connections of a listener. Those that did not show the token yet are kept in the order of their
    arrival; ``drop`` ends one, ``on_dropped`` gets the reason.
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
        """Add a connection; where it is one too many, the oldest is dropped."""
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
        """The connection showed the token; return whether there is a place for it. Idempotent.

        One without a place is unauthenticated still: it is closed when its time is over.
        """
        if connection not in self._known and len(self._known) >= self._limits.connections_max:
            return False
        self._since_s.pop(connection, None)
        self._known.add(connection)
        return True

    def discard(self, connection: T) -> None:
        """The connection is closed."""
        self._since_s.pop(connection, None)
        self._known.discard(connection)

    def older_than(self, then_s: float) -> list[T]:
        """The connections that were added before ``then_s`` and did not show the token."""
        return [connection for connection, since_s in self._since_s.items() if since_s < then_s]
