"""What both ends of ZeroMQ share: topics, keys from the token, sockets on the event loop."""

import asyncio
import hashlib
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvrouter.core.ids import WorkerId
from kvrouter.transports.events.wire import VERSION

BATCH, LOAD = b"b", b"l"
WORKER_BYTES = 8
TOPIC_BYTES = 1 + WORKER_BYTES + 1

MESSAGES_MAX = 4_096
"""How many messages wait for one peer that does not take them; then they are dropped."""

MESSAGES_PER_TURN = 64
"""How many messages are read before the event loop turns to others: about a millisecond of work."""

HANDSHAKE_MAX_MS = 5_000
HEARTBEAT_MS = 5_000
SILENCE_MAX_MS = 15_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 5_000


MESSAGES_PER_SOCKET = 16
"""How many of those come from one socket before the others have their turn."""


def worker_topic(worker_id: WorkerId) -> bytes:
    """Return what every message of the worker begins with; one byte for its kind follows."""
    return bytes([VERSION]) + worker_id.to_bytes(WORKER_BYTES, "big")


def topic_of(message: bytes) -> tuple[int, bytes]:
    """Return whose topic a message of a followed worker came by, and its kind."""
    worker_id = int.from_bytes(message[1 : 1 + WORKER_BYTES], "big")
    return worker_id, message[TOPIC_BYTES - 1 : TOPIC_BYTES]


class TokenKeys:
    """CURVE keys of both ends, all from the shared token.

    A client can only begin a handshake when it knows the server's public key, which never travels: a client
    that does not have the token is refused before any of its frames is read, and reads none. Deriving takes
    long on purpose, because a handshake that was overheard allows to try tokens.
    """

    def __init__(self, token: str) -> None:
        self._server = _secret_key(token, b"kvrouter events server")
        self._client = _secret_key(token, b"kvrouter events client")

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Let only clients with the token in."""
        socket.curve_server = True
        socket.curve_secretkey = self._server

    def join(self, socket: "zmq.Socket[bytes]") -> None:
        """Connect only to servers with the token."""
        socket.curve_serverkey = zmq.curve_public(self._server)
        socket.curve_secretkey = self._client
        socket.curve_publickey = zmq.curve_public(self._client)


def _secret_key(token: str, purpose: bytes) -> bytes:
    return z85.encode(hashlib.scrypt(token.encode(), salt=purpose, n=2**14, r=8, p=1, dklen=32))


def new_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, *, message_max_bytes: int
) -> "zmq.Socket[bytes]":
    """Return a socket whose queues and messages have a limit, and that notices a peer that is gone."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = MESSAGES_MAX
    socket.maxmsgsize = message_max_bytes
    socket.handshake_ivl = HANDSHAKE_MAX_MS
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = SILENCE_MAX_MS
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    return socket


class Turns:
    """Reads the sockets of one end, on the event loop: so many messages in a turn of it, over all sockets."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Inlet, None] = {}
        self._turn: asyncio.Handle | None = None

    def add(self, inlet: "Inlet") -> None:
        """Read what the socket has, soon."""
        self._ready[inlet] = None
        self._schedule()

    def remove(self, inlet: "Inlet") -> None:
        """Read nothing more of the socket."""
        self._ready.pop(inlet, None)

    def _schedule(self) -> None:
        if self._turn is None and self._ready:
            self._turn = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._turn = None
        left = MESSAGES_PER_TURN
        try:
            while left > 0 and self._ready:
                inlet = next(iter(self._ready))
                del self._ready[inlet]
                left -= 1
                for _ in range(MESSAGES_PER_SOCKET):
                    if not inlet.read_one():
                        break
                    left -= 1
                else:
                    self._ready[inlet] = None
        finally:
            self._schedule()


class Inlet:
    """Hands every message that arrives on a socket to ``on_message``, when ``turns`` has its turn.

    ZeroMQ notifies of arrivals once, and any other call on the socket may consume the notification: call
    :meth:`look` after each.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None], turns: Turns
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._turns = turns
        self._fd = socket.fileno()
        asyncio.get_running_loop().add_reader(self._fd, self.look)
        self.look()

    def look(self) -> None:
        """Read what is there, soon."""
        self._turns.add(self)

    def read_one(self) -> bool:
        """Hand over one message; False when there is none, or the socket is closed."""
        if self._socket.closed:
            return False
        try:
            message = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._on_message(message)
        except BaseException:
            self.look()  # the notification of what follows may be consumed
            raise
        return not self._socket.closed

    def close(self) -> None:
        """Read nothing any more, and close the socket."""
        self._turns.remove(self)
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.close(linger=0)
