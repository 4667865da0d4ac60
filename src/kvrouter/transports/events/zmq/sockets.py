"""Shared parts of both ends over ZeroMQ: topics, keys from the token, sockets on the event loop."""

import asyncio
import hashlib
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvrouter.core.ids import WorkerId
from kvrouter.transports.events.encoding import VERSION

BATCH, LOAD = b"b", b"l"
WORKER_BYTES = 8
TOPIC_BYTES = 1 + WORKER_BYTES + 1

MESSAGES_MAX = 4_096
"""Messages that wait for a slow peer before further ones are dropped."""

MESSAGES_PER_TURN = 64
"""Messages read before the event loop runs other tasks: about a millisecond of work."""

HANDSHAKE_MAX_MS = 5_000
HEARTBEAT_MS = 5_000
SILENCE_MAX_MS = 15_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 5_000


MESSAGES_PER_SOCKET = 16
"""Messages read from one socket before the other sockets."""


def worker_topic(worker_id: WorkerId) -> bytes:
    """Return the prefix of every message of the worker; a byte for its kind follows."""
    return bytes([VERSION]) + worker_id.to_bytes(WORKER_BYTES, "big")


def topic_of(message: bytes) -> tuple[int, bytes]:
    """Return the worker id and the kind of a message."""
    worker_id = int.from_bytes(message[1 : 1 + WORKER_BYTES], "big")
    return worker_id, message[TOPIC_BYTES - 1 : TOPIC_BYTES]


class TokenKeys:
    """CURVE keys of both ends, derived from the shared token.

    A client can begin a handshake only with the server's public key, which is never sent: a client without
    the token is refused before any of its frames is read. The derivation is slow on purpose, because a
    recorded handshake allows to try tokens offline.
    """

    def __init__(self, token: str) -> None:
        self._server = _secret_key(token, b"kvrouter events server")
        self._client = _secret_key(token, b"kvrouter events client")

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Configure a server socket: only clients with the token connect."""
        socket.curve_server = True
        socket.curve_secretkey = self._server

    def join(self, socket: "zmq.Socket[bytes]") -> None:
        """Configure a client socket: it connects only to servers with the token."""
        socket.curve_serverkey = zmq.curve_public(self._server)
        socket.curve_secretkey = self._client
        socket.curve_publickey = zmq.curve_public(self._client)


def _secret_key(token: str, purpose: bytes) -> bytes:
    return z85.encode(hashlib.scrypt(token.encode(), salt=purpose, n=2**14, r=8, p=1, dklen=32))


def new_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, *, message_max_bytes: int
) -> "zmq.Socket[bytes]":
    """Return a socket with limits on queues and messages, and with heartbeats."""
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


class ReadScheduler:
    """Reads the sockets of one end on the event loop, fairly, a limited number of messages per turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[SocketReader, None] = {}
        self._turn: asyncio.Handle | None = None

    def add(self, reader: "SocketReader") -> None:
        """Schedule a socket for reading."""
        self._ready[reader] = None
        self._schedule()

    def remove(self, reader: "SocketReader") -> None:
        """Remove a socket."""
        self._ready.pop(reader, None)

    def _schedule(self) -> None:
        if self._turn is None and self._ready:
            self._turn = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._turn = None
        left = MESSAGES_PER_TURN
        try:
            while left > 0 and self._ready:
                reader = next(iter(self._ready))
                del self._ready[reader]
                left -= 1
                for _ in range(MESSAGES_PER_SOCKET):
                    if not reader.read_one():
                        break
                    left -= 1
                else:
                    self._ready[reader] = None
        finally:
            self._schedule()


class SocketReader:
    """Passes every message of a socket to ``on_message``, when ``scheduler`` schedules it.

    ZeroMQ signals arrivals once, and any other call on the socket may consume the signal: call
    :meth:`schedule` after each.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None], scheduler: ReadScheduler
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._scheduler = scheduler
        self._fd = socket.fileno()
        asyncio.get_running_loop().add_reader(self._fd, self.schedule)
        self.schedule()

    def schedule(self) -> None:
        """Schedule the socket for reading."""
        self._scheduler.add(self)

    def read_one(self) -> bool:
        """Pass on one message; return False when there is none, or the socket is closed."""
        if self._socket.closed:
            return False
        try:
            message = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._on_message(message)
        except BaseException:
            self.schedule()  # the signal of the next message may be consumed
            raise
        return not self._socket.closed

    def close(self) -> None:
        """Stop reading, and close the socket."""
        self._scheduler.remove(self)
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.close(linger=0)
