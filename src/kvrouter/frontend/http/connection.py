"""One HTTP/1.1 server connection without sockets: bytes and the time go in, events come out.

::

            first byte        headers complete        message complete
    IDLE ───────────────▶ HEAD ───────────────▶ BODY ───────────────▶ IDLE
      │ idle_s             │ header_s             │ body_s
      ▼                    ▼                      ▼
    ENDED ◀── fault ───────┴──────────────────────┘        also: EOF, "Connection: close"

Beside the phase stands a count of requests that were reported and not answered yet. At
``Limits.pipelined_requests``, or when their bodies reach ``Limits.body_bytes``, parsing stops between two
messages and ``wants_read`` is False until ``request_done``; no clock runs against the client meanwhile.

A body has ``body_s`` to arrive. Each byte puts the deadline off by the time that it needs at
``body_bytes_per_s``, but never further than ``body_s`` from now: a body that stands still ends then, however
much of it is there.
"""

from collections import deque
from enum import Enum, auto

from kvrouter.frontend.http.chunks import ChunkScanner
from kvrouter.frontend.http.limits import Limits
from kvrouter.frontend.http.messages import (
    UPLOAD_TOO_SLOW,
    BadRequest,
    CloseReason,
    ConnectionClosed,
    Event,
)
from kvrouter.frontend.http.parsing import MessageParser, after_empty_lines

__all__ = ["ServerConnection"]

_HEAD_END = b"\r\n\r\n"
# A chunk of one byte costs five bytes of framing; a client that needs more than eight is padding.
_FRAMING_PER_BODY_BYTE = 8


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    ENDED = auto()


class ServerConnection:
    """Turns bytes into events; never raises on what a client sends.

    After a :class:`BadRequest` or :class:`ConnectionClosed` no further event comes, and bytes are dropped.
    """

    def __init__(self, limits: Limits, *, now_s: float) -> None:
        self._limits = limits
        self._parser = MessageParser(limits)
        self._phase = _Phase.IDLE
        self._since_s = now_s
        self._body_due_s = now_s
        self._body_seen_bytes = 0
        self._first = True
        self._unfed = b""
        self._unfed_at = 0
        self._tail = b""  # the last three bytes fed: a head's end may straddle two reads
        self._head_bytes = 0
        self._framing_bytes = 0
        self._chunks = ChunkScanner()
        self._waiting_bytes: deque[int] = deque()  # bodies of the requests not answered yet

    @property
    def wants_read(self) -> bool:
        """False while as many requests wait as may; more bytes would only pile up."""
        return not self._is_full()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is owed to the client and nothing of a request has arrived."""
        return self._phase in (_Phase.IDLE, _Phase.ENDED) and not self._waiting_bytes

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that are kept here: of a request that is not complete, and those not yet parsed."""
        kept_bytes = len(self._unfed) - self._unfed_at + self._head_bytes
        return kept_bytes + (self._parser.body_bytes if self._phase is _Phase.BODY else 0)

    def end(self) -> None:
        """Drop what was received of an unfinished request; nothing more is taken."""
        self._end()

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Takes what was read from the socket."""
        if self._phase is _Phase.ENDED:
            return []
        self._unfed = self._unfed[self._unfed_at :] + data if self._unfed else data
        self._unfed_at = 0
        return self._parse(now_s)

    def receive_eof(self) -> list[Event]:
        """The client shut its writing side; it may still read what it is owed."""
        if self._phase is _Phase.ENDED:
            return []
        whole = self._phase is _Phase.IDLE and not self._unfed
        self._end()
        return [ConnectionClosed(CloseReason.EOF if whole else CloseReason.EOF_IN_REQUEST)]

    def request_done(self, now_s: float) -> list[Event]:
        """The oldest request was answered; parses on where the limit had stopped it.

        Raises IndexError when no request waits for an answer.
        """
        was_full = self._is_full()
        self._waiting_bytes.popleft()
        if self._phase is _Phase.ENDED:
            return []
        if was_full or self._phase is _Phase.IDLE:
            self._since_s = now_s
        return self._parse(now_s)

    def deadline_s(self) -> float | None:
        """When ``on_time`` will have something to say, on the clock of ``now_s``; None: no clock runs."""
        if self._phase is _Phase.ENDED or self._is_full():
            return None
        if self._phase is _Phase.BODY:
            return self._body_due_s
        if self._phase is _Phase.HEAD:
            return self._since_s + self._limits.header_s
        if self._waiting_bytes:
            return None
        return self._since_s + (self._limits.header_s if self._first else self._limits.idle_s)

    def on_time(self, now_s: float) -> list[Event]:
        """What the time brings: nothing before the deadline, the end of the connection after it."""
        deadline_s = self.deadline_s()
        if deadline_s is None or now_s < deadline_s:
            return []
        phase = self._phase
        self._end()
        if phase is _Phase.IDLE:
            return [ConnectionClosed(CloseReason.IDLE)]
        if phase is _Phase.BODY:
            rate = f"{self._limits.body_bytes_per_s:g} bytes/s"
            reason = f"the request's body took too long to arrive: {self._limits.body_s:g} s below {rate}"
            return [BadRequest(408, reason, UPLOAD_TOO_SLOW)]
        return [BadRequest(408, "the request's headers took too long to arrive")]

    def _is_full(self) -> bool:
        waiting = self._waiting_bytes
        if not waiting:
            return False
        return len(waiting) >= self._limits.pipelined_requests or sum(waiting) >= self._limits.body_bytes

    def _parse(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        view = memoryview(self._unfed)
        while self._unfed_at < len(view) and self._phase is not _Phase.ENDED and not self._is_full():
            piece = view[self._unfed_at : self._piece_end()]
            taken = self._parser.feed(piece)
            self._unfed_at += taken
            self._tail = (self._tail + piece[:taken][-3:].tobytes())[-3:]
            self._after_piece(taken, now_s, events)
        if self._unfed_at >= len(self._unfed):
            self._unfed, self._unfed_at = b"", 0
        return events

    def _piece_end(self) -> int:
        """Where the next piece ends. A message ends with a piece, so that a pause can fall between two."""
        at, size = self._unfed_at, len(self._unfed)
        if self._phase is _Phase.BODY:
            left = self._parser.body_left_bytes
            return self._chunks.end(self._unfed, at) if left is None else min(size, at + left)
        straddling, begin = -1, at
        if self._parser.awaits_line:
            begin = after_empty_lines(self._unfed, at)
        else:
            straddling = (self._tail + self._unfed[at : at + 3]).find(_HEAD_END)
        if straddling >= 0:
            end = at + straddling + len(_HEAD_END) - len(self._tail)
        else:
            found = self._unfed.find(_HEAD_END, begin)
            end = size if found < 0 else found + len(_HEAD_END)
        return min(end, at + self._limits.header_bytes - self._head_bytes + 1)

    def _after_piece(self, fed_bytes: int, now_s: float, events: list[Event]) -> None:
        parser = self._parser
        if self._phase is _Phase.BODY:
            self._framing_bytes += fed_bytes
        else:
            self._head_bytes += fed_bytes
            if self._head_bytes > self._limits.header_bytes and parser.fault is None:
                parser.fault = BadRequest(431, f"the headers are over {self._limits.header_bytes} bytes")
        head = parser.take_head()
        if head is not None:
            events.append(head)
        for request in parser.take_requests():
            request.head_bytes = self._head_bytes
            events.append(request)
            self._waiting_bytes.append(len(request.body))
            self._first = False
            self._head_bytes = self._framing_bytes = 0
            self._enter(_Phase.IDLE, now_s)
            if not request.head.keep_alive:
                self._end()
                return
        if parser.fault is None and parser.head is not None and parser.body_left_bytes is None:
            allowed = self._limits.header_bytes + (1 + _FRAMING_PER_BODY_BYTE) * parser.body_bytes
            if self._framing_bytes > allowed:
                parser.fault = BadRequest(400, "chunk framing out of proportion to the body")
        if parser.fault is not None:
            events.append(parser.fault)
            self._end()
        elif parser.head is not None:
            self._enter(_Phase.BODY, now_s)
            self._put_off(now_s)
        elif self._head_bytes:
            self._enter(_Phase.HEAD, now_s)

    def _enter(self, phase: _Phase, now_s: float) -> None:
        if self._phase is not phase:
            self._phase, self._since_s = phase, now_s
            self._body_due_s, self._body_seen_bytes = now_s + self._limits.body_s, 0
            self._chunks = ChunkScanner()

    def _put_off(self, now_s: float) -> None:
        body_bytes, body_s = self._parser.body_bytes, self._limits.body_s
        arrived_bytes, self._body_seen_bytes = body_bytes - self._body_seen_bytes, body_bytes
        due_s = self._body_due_s + arrived_bytes / self._limits.body_bytes_per_s
        self._body_due_s = min(due_s, now_s + body_s)

    def _end(self) -> None:
        self._phase = _Phase.ENDED
        self._parser.close()
        self._unfed, self._unfed_at, self._head_bytes = b"", 0, 0
