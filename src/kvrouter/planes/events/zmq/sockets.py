"""What both ends have in common: topics, keys from the shared token, and a socket on the event loop."""

import asyncio
import hashlib
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvrouter.core.ids import WorkerId
from kvrouter.planes.events.wire import VERSION

BATCH, LOAD = b"b", b"l"
WORKER_BYTES = 8
TOPIC_BYTES = 1 + WORKER_BYTES + 1

MESSAGES_MAX = 4_096
"""How many messages wait for one peer that does not take them; then they are let go."""

MESSAGES_PER_TURN = 64
"""How many messages are read before the event loop turns to others: about a millisecond of work."""

HANDSHAKE_MAX_MS = 5_000
HEARTBEAT_MS = 5_000
SILENCE_MAX_MS = 15_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 5_000


def worker_topic(worker_id: WorkerId) -> bytes:
    """Return what every message of the worker begins with; one byte for its kind follows."""
    return bytes([VERSION]) + worker_id.to_bytes(WORKER_BYTES, "big")


class TokenKeys:
    """CURVE keys of both ends, all from the shared token.

    A client can only begin a handshake when it knows the server's public key, which never travels: whoever
    does not have the token is refused before a frame of his is read, and reads none. Deriving takes long on
    purpose, because a handshake that was overheard allows to try tokens.
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


class Inlet:
    """Hands every message that arrives on a socket to ``on_message``, on the event loop.

    ZeroMQ tells of arrivals once, and any other call on the socket may eat the notice: :meth:`look` after
    each.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._looks: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)
        self.look()

    def look(self) -> None:
        """Read what is there, soon."""
        if self._looks is None:
            self._looks = self._loop.call_soon(self._read)

    def close(self) -> None:
        """Read nothing any more, and close the socket."""
        if self._looks is not None:
            self._looks.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)

    def _read(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
            self._looks = None
        is_empty = False
        try:
            for _ in range(MESSAGES_PER_TURN):
                self._on_message(self._socket.recv_multipart(zmq.NOBLOCK))
                if self._socket.closed:
                    return
        except zmq.Again:
            is_empty = True
        finally:
            if not is_empty and not self._socket.closed:
                self.look()
