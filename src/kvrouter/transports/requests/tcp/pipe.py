"""One tcp connection, either end: the pipe of bytes under a session, with its writes and timers."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import bracketed
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.messages import NONCE_BYTES
from kvrouter.transports.requests.session import LEFT, Session

WRITE_HIGH_BYTES = 256 * 1024
"""Above so many waiting bytes, those that produce more are asked to wait."""

CLOSE_WITHIN_S = 1.0
"""How long the last bytes of a connection may take to leave."""


class TcpPipe(asyncio.Protocol):
    """One connection. All that its session says in one turn of the loop leaves in one write.

    A subclass makes the ``session``, and gives it :meth:`wake`.
    """

    session: Session

    def __init__(self, *, heartbeat_s: float, write_max_bytes: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._heartbeat_s = heartbeat_s
        self._write_max_bytes = write_max_bytes
        self._transport: asyncio.Transport | None = None
        self._is_ending = False
        self._awake_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the connection is of no use any more."""
        return self.session.is_closed

    @property
    def peer(self) -> str:
        """Who is at the other end, for words to people."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "somebody"

    @property
    def written_bytes(self) -> int:
        """How many bytes that left the session wait for the peer to read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        """Take what the peer sent."""
        self.session.receive(data)

    def wake(self) -> None:
        """The session has something to send: it leaves at the end of this turn."""
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:  # it leaves once the connection is there
            return
        data = self.session.take_output()
        if self._is_ending:
            return
        if data:
            transport.write(data)
            if transport.get_write_buffer_size() > self._write_max_bytes:
                self.session.lose(f"the peer left over {self._write_max_bytes} bytes unread")
        if self.session.is_closed:
            self._hang_up(transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there: keep time from now on."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        self._transport = stream
        if self.session.is_closed:  # given up while it was being made
            self._is_ending = True
            stream.abort()
            return
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._timer = self.loop.call_later(self._heartbeat_s, self._beat)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whichever end closed it."""
        self._is_ending = True
        self.session.lose(LEFT if exc is None else f"{LEFT}: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self, reason: str) -> None:
        """Say why and end, once what was sent before has left. Idempotent."""
        self.session.close(reason)

    def abort(self, reason: str) -> None:
        """End at once: the peer is not expected to read. Idempotent."""
        self.session.lose(reason)
        if self._transport is not None and not self._is_ending:
            self._hang_up(self._transport)

    def _hang_up(self, transport: asyncio.Transport) -> None:
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        if self.session.is_lost:
            transport.abort()
        else:
            transport.close()
            self._timer = self.loop.call_later(CLOSE_WITHIN_S, transport.abort)

    def _beat(self) -> None:
        """Beats are counted, not seconds: a loop that was blocked has not heard its peers meanwhile."""
        self._awake_s += self._heartbeat_s
        self._timer = self.loop.call_later(self._heartbeat_s, self._beat)
        self.session.tick(self._awake_s)


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


def new_nonce() -> bytes:
    """Return a number used once."""
    return secrets.token_bytes(NONCE_BYTES)
