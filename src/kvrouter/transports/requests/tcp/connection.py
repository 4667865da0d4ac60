"""One tcp connection, either end: frames, gathered writes, timers, an end with a reason."""

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from kvrouter.core.errors import ProtocolError
from kvrouter.transports.requests.tcp.frames import FrameKind, FrameReader, frame, goodbye

WRITE_HIGH_BYTES = 256 * 1024
"""Above so many waiting bytes, those that produce more are asked to wait."""

UNREAD_MAX_BYTES = 128 * 1024 * 1024
"""A peer that leaves more than this unread is given up."""

CLOSE_WITHIN_S = 1.0
"""How long the last bytes of a connection may take to leave."""

LEFT = "the connection was closed"


class Connection(asyncio.Protocol):
    """One connection. All that is sent in one turn of the loop leaves in one write.

    A subclass says what it reads (``handlers``), what the first bytes mean (:meth:`read_opening`), and what
    has to happen at the end (:meth:`ended`).
    """

    def __init__(
        self, *, kinds: Mapping[int, int], heartbeat_s: float, dead_after_s: float, write_max_bytes: int
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self.is_closed = False
        self.is_choked = False
        self.was_refused = False
        self.handlers: dict[int, Callable[[bytes], None]] = {
            FrameKind.PING: self._on_ping,
            FrameKind.PONG: self._on_pong,
            FrameKind.GOODBYE: self._on_goodbye,
        }
        self.heartbeat_s = heartbeat_s
        self._reader = FrameReader(kinds)
        self._opening: bytearray | None = bytearray()
        self._transport: asyncio.Transport | None = None
        self._dead_after_s = dead_after_s
        self._write_max_bytes = write_max_bytes
        self._out: list[bytes] = []
        self.is_flush_due = False
        self._silent_beats = 0
        self._has_sent = False
        self._timer: asyncio.TimerHandle | None = None

    # What a subclass brings

    def read_opening(self, data: bytearray) -> int | None:
        """Return how many bytes the peer's opening took, None while some are missing; ProtocolError."""
        raise NotImplementedError

    def gather(self) -> None:
        """Put what waits to be sent into frames: it goes before whatever is sent next."""

    def beat(self) -> None:
        """A heartbeat has passed."""

    def ended(self, reason: str) -> None:
        """The connection is of no use any more; called once."""

    # Reading

    def read_only(self, kinds: Mapping[int, int]) -> None:
        """From the next read on only frames of these kinds may come, each with its largest body in bytes."""
        self._reader.kinds = kinds

    def data_received(self, data: bytes) -> None:
        """Take what the peer sent."""
        self._silent_beats = 0
        if self.is_closed:
            return
        try:
            if self._opening is not None:
                self._opening += data
                used = self.read_opening(self._opening)
                if used is None:
                    return
                data = bytes(self._opening[used:])
                self._opening = None
            for kind, body in self._reader.feed(data):
                self._take(kind, body)
        except ProtocolError as error:
            self.refuse(error.message)

    def _take(self, kind: int, body: bytes) -> None:
        if not self.is_closed:  # as it may be by the frame before
            self.handlers[kind](body)

    def refuse(self, reason: str) -> None:
        """The peer did what the protocol does not allow."""
        self.was_refused = True
        self.close(reason)

    def _on_ping(self, _: bytes) -> None:
        self.send(FrameKind.PONG)

    def _on_pong(self, _: bytes) -> None:
        pass

    def _on_goodbye(self, body: bytes) -> None:
        self.was_refused = True
        self._end(body.decode("utf-8", "replace") or LEFT)
        if self._transport is not None:
            self._transport.close()

    # Writing

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send a frame with the others of this turn."""
        self.gather()
        self._out.append(frame(kind, body))
        self.flush_soon()

    def send_raw(self, data: bytes) -> None:
        """Send bytes that are no frame: an opening."""
        self._out.append(data)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Have everything that was gathered written at the end of this turn."""
        if not self.is_flush_due:
            self.is_flush_due = True
            self.loop.call_soon(self._flush)

    @property
    def peer(self) -> str:
        """Who is at the other end, for words to people."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "somebody"

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait for the peer to read."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return written + sum(map(len, self._out))

    def _flush(self) -> None:
        if self.is_closed or self._transport is None:
            self._out.clear()
        else:
            self.gather()
        self.is_flush_due = False
        if not self._out or self._transport is None:
            return
        self._has_sent = True
        self._transport.write(self._out[0] if len(self._out) == 1 else b"".join(self._out))
        self._out.clear()
        if self._transport.get_write_buffer_size() > self._write_max_bytes:
            self.abort(f"the peer left over {self._write_max_bytes} bytes unread")

    def pause_writing(self) -> None:
        """More bytes wait for the peer than should."""
        self.is_choked = True

    def resume_writing(self) -> None:
        """The peer has read on."""
        self.is_choked = False

    # Life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there: keep time from now on."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        self._transport = stream
        if self.is_closed:  # given up while it was being made
            stream.abort()
            return
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._timer = self.loop.call_later(self.heartbeat_s, self._beat)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whichever end closed it."""
        self._end(LEFT if exc is None else f"{LEFT}: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self, reason: str) -> None:
        """Say why and end, once what was sent before has left. Idempotent."""
        if self.is_closed:
            return
        if self._transport is not None:
            self.gather()
            self._transport.write(b"".join([*self._out, goodbye(reason)]))
            self._out.clear()
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(CLOSE_WITHIN_S, self._transport.abort)
        self._end(reason)

    def abort(self, reason: str) -> None:
        """End at once: the peer is not expected to read. Idempotent."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.ended(reason)

    def _beat(self) -> None:
        """Beats are counted, not seconds: a loop that was blocked has not heard its peers meanwhile."""
        self._silent_beats += 1
        if (self._silent_beats - 1) * self.heartbeat_s >= self._dead_after_s:
            self.abort(f"nothing was heard for {self._dead_after_s:g} s")
            return
        if self._opening is None and self._silent_beats > 1:
            self.send(FrameKind.PING)
        elif self._opening is None and not self._has_sent:
            self.send(FrameKind.PONG)  # a sign of life, so that the other end need not ask
        self._has_sent = False
        self._timer = self.loop.call_later(self.heartbeat_s, self._beat)
        self.beat()
