"""One connection over tcp, for both ends, and the address of a worker."""

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial
from typing import cast
from urllib.parse import urlsplit

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import bracketed, is_resolvable
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.handshake import NONCE_BYTES
from kvrouter.transports.requests.session import LEFT, Session

WRITE_HIGH_BYTES = 256 * 1024
"""Unsent bytes above which producers are paused."""

CLOSE_WITHIN_S = 1.0
"""How long the last bytes of a connection may take to be sent."""


class TcpPipe(asyncio.Protocol):
    """One connection. All output of its session in one turn of the loop is sent in one write, or earlier by
    :meth:`flush`. A subclass creates the ``session``, and gives it :meth:`wake`.
    """

    session: Session

    def __init__(self, *, heartbeat_s: float, write_max_bytes: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.wake = partial(self.loop.call_soon, self.flush)
        """Schedules a flush at the end of this turn: the session has output."""
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._heartbeat_s = heartbeat_s
        self._write_max_bytes = write_max_bytes
        self._transport: asyncio.Transport | None = None
        self._is_ending = False
        self._clock = AwakeClock(heartbeat_s)
        self._beat_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self.session.is_closed

    @property
    def peer(self) -> str:
        """The address of the peer, for messages to people."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "somebody"

    @property
    def written_bytes(self) -> int:
        """The bytes of session output that wait in the socket's buffer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the session."""
        self.session.receive(data)

    def flush(self) -> None:
        """Send the session's output now."""
        transport = self._transport
        if transport is None:  # the output is sent once the connection is open
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
        """Start the heartbeat, and send the pending output."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports do not subclass asyncio's
        self._transport = stream
        if self.session.is_closed:  # given up while it was connecting
            self._is_ending = True
            stream.abort()
            return
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._timer = self.loop.call_later(self._heartbeat_s, self._beat)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, whichever end closed it."""
        self._is_ending = True
        self.session.lose(LEFT if exc is None else f"{LEFT}: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self, reason: str) -> None:
        """End with a reason, after all earlier output. Idempotent."""
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
        now_s = self.loop.time()
        self._clock.advance(now_s - self._beat_s)
        self._beat_s = now_s
        self._timer = self.loop.call_later(self._heartbeat_s, self._beat)
        self.session.tick(self._clock.now_s)


_ID_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """The address of one incarnation of a worker, behind a listener that may serve several."""

    host: str
    port: int
    worker_id: WorkerId
    incarnation: Epoch

    def __str__(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}/{self.worker_id}/{self.incarnation}"


def read_address(address: str) -> TcpAddress:
    """Parse ``address``; raise ConfigError for another form."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        worker_id, incarnation = (int(part) for part in parts.path.removeprefix("/").split("/"))
    except ValueError as error:
        raise _unreadable(address) from error
    if parts.scheme != "tcp" or not host or not is_resolvable(host) or not port:
        raise _unreadable(address)
    if not (0 <= worker_id < _ID_LIMIT and 0 <= incarnation < _ID_LIMIT):
        raise _unreadable(address)
    return TcpAddress(host, port, WorkerId(worker_id), Epoch(incarnation))


def _unreadable(address: str) -> ConfigError:
    return ConfigError(f"address: {address!r} is not tcp://host:port/worker_id/incarnation", param="address")


def new_nonce() -> bytes:
    """Return a number used once."""
    return secrets.token_bytes(NONCE_BYTES)
