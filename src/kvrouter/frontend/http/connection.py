"""One HTTP/1.1 server connection, sans-I/O: bytes and the time go in, events come out.

::

            first byte        headers complete        message complete
    IDLE ───────────────▶ HEAD ───────────────▶ BODY ───────────────▶ IDLE
      │ idle_s             │ header_s             │ body_s
      ▼                    ▼                      ▼
    ENDED ◀── fault ───────┴──────────────────────┘        also: EOF, "Connection: close"

Besides the phase, a connection counts the requests that were reported and are not answered yet. At
``Limits.pipelined_requests``, or when their bodies reach ``Limits.body_bytes``, parsing stops between two
messages and ``wants_read`` is False until ``request_done``; no timeout of the client runs meanwhile.

A body has ``body_s`` to arrive. Each byte extends the deadline by its time at ``body_bytes_per_s``, but never
to more than ``body_s`` from now: a body that stalls for ``body_s`` is refused, however much of it arrived.

The grammar is llhttp's, strict. This module adds the refusals that protect proxies in front (RFC 9112 §3.2,
§6.3): a request with two framings of its body, or without exactly one Host header, ends the connection. It
also checks the request line before llhttp, which accepts RTSP, ICE and any number of spaces.

The framing is parsed here as well, only to hand llhttp one message at a time. Llhttp's reading counts: where
the two disagree, a message that begins inside a piece is refused.
"""

import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from io import BytesIO
from typing import NoReturn
from urllib.parse import unquote_to_bytes

import httptools

from kvrouter.core.errors import BodyTooLarge, InvalidRequest
from kvrouter.frontend.http.limits import BODY_UNASKED_BYTES, Limits
from kvrouter.frontend.http.response import (
    UPLOAD_TOO_SLOW,
    BadRequest,
    CloseReason,
    ConnectionClosed,
    Event,
    Request,
    RequestHead,
)

__all__ = ["ChunkScanner", "MessageParser", "ServerConnection"]


_VERSIONS = frozenset({b"HTTP/1.0", b"HTTP/1.1"})
_NOT_IN_LINE = re.compile(rb"[^\x20-\x7e]")
_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [^ ]+ ([A-Z]+/[0-9]\.[0-9])")
_AUTHORITY = rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]*)?"
_HOST = re.compile(rb"(?:" + _AUTHORITY + rb")?")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_ABSOLUTE_FORM = re.compile(rb"https?://" + _AUTHORITY + rb"(?=[/?]|$)", re.IGNORECASE)
_EMPTY_LINES = re.compile(rb"[\r\n]++")
_CR = 13
_UNKNOWN_METHOD = "Invalid method"


class _Fault(Exception):
    """Raised inside a parser callback to stop the parser."""


def after_empty_lines(data: bytes | bytearray, at: int) -> int:
    """Return the position after the empty lines at ``at``; a request may start with some (RFC 9112 §2.2)."""
    found = _EMPTY_LINES.match(data, at)
    return at if found is None else found.end()


class MessageParser:
    """Parses requests. The first refused one sets ``fault``; ``feed`` must not be called after that."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self.fault: BadRequest | None = None
        self._finished: list[Request] = []
        self._fresh_head: RequestHead | None = None
        self._is_resuming = False
        self._line: bytearray | None = bytearray()
        self._line_begin = self._line_checked = 0
        self._begin()

    @property
    def awaits_line(self) -> bool:
        """Whether only empty lines of the next message were fed."""
        return self._line is not None and self._line_begin == len(self._line)

    @property
    def body_bytes(self) -> int:
        """The bytes of the current body received so far."""
        return self._body.tell()

    @property
    def body_left_bytes(self) -> int | None:
        """The missing bytes of the current body; None when it is chunked."""
        return None if self._content_bytes is None else self._content_bytes - self._body.tell()

    def refusal(self, status: int, reason: str, code: str = InvalidRequest.code) -> BadRequest:
        """Return a refusal of the current message, with the parts of its head that were read."""
        path = None if self.head is None else self.head.path
        if path is None and self._target:
            with suppress(UnicodeDecodeError, _InvalidTarget):
                path = _split_target(self._target)[1]
        return BadRequest(status, reason, code, path, tuple(self._headers))

    def feed(self, data: memoryview) -> int:
        """Parse ``data``; set ``fault`` instead of raising. Return the bytes taken: not all at an upgrade.

        An upgrade request is served as a plain one (RFC 9110 §7.8). Java's HTTP client asks for an upgrade
        with its first POST over plain text.
        """
        kept_bytes = 0
        if self._line is not None:
            kept_bytes = len(self._line)
            self._line += data
            if not self._has_line(self._line):
                return len(data)
            data, self._line = memoryview(self._line), None
        try:
            self._grammar.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.head is not None:
                self._resume_body()
            return int(upgrade.args[0]) - kept_bytes
        except httptools.HttpParserError as error:
            if self.fault is None:
                status = 501 if str(error).startswith(_UNKNOWN_METHOD) else 400
                self.fault = self.refusal(status, f"malformed HTTP: {error}")
        return len(data) - kept_bytes

    def _has_line(self, line: bytearray) -> bool:
        """Whether the request line is complete and valid; sets ``fault`` for an invalid one."""
        begin = self._line_begin = after_empty_lines(line, self._line_begin)
        checked, end = max(self._line_checked, begin), line.find(b"\n", max(self._line_checked, begin))
        until = end - 1 if end > begin else len(line) - line.endswith(b"\r")
        self._line_checked = max(until, begin)
        if _NOT_IN_LINE.search(line, checked, until) or (end > begin and line[until] != _CR):
            self.fault = BadRequest(400, "malformed HTTP: a character that no request line has")
        elif end > begin:
            found = _REQUEST_LINE.fullmatch(line, begin, until)
            if found is None:
                self.fault = BadRequest(400, "malformed HTTP: not a request line")
            elif found[1] not in _VERSIONS:
                self.fault = BadRequest(505, "HTTP version not supported")
            return self.fault is None
        return False

    def close(self) -> None:
        """Drop the current message; ``feed`` must not be called again.

        This breaks the reference cycle of parser and grammar, which would keep the bytes of an unfinished
        body until the garbage collector runs.
        """
        self._parser = None
        self._begin()

    def take_head(self) -> RequestHead | None:
        """Return the head completed since the last call, or None."""
        head, self._fresh_head = self._fresh_head, None
        return head

    def take_requests(self) -> list[Request]:
        """Return the requests completed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        """Start a message; refuse one without a checked request line."""
        if self._line is not None:
            self._refuse(400, "malformed HTTP: bytes behind the body")

    def _begin(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = BytesIO()  # getvalue() makes no copy
        self.head: RequestHead | None = None
        """The head of the message whose body is being read."""
        self._content_bytes: int | None = 0
        self._body_fits_bytes = min(self._limits.body_bytes, BODY_UNASKED_BYTES)

    def _await_line(self) -> None:
        self._line = bytearray()
        self._line_begin = self._line_checked = 0

    def on_url(self, url: bytes) -> None:
        """Add a part of the request target."""
        if not self._is_resuming:
            self._target += url

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """Add a header; a trailer is counted and dropped."""
        if self._is_resuming:
            return
        self._headers.append((name.lower(), (value or b"").strip(b" \t")))
        if len(self._headers) > self._limits.headers:
            self._refuse(431, f"more than {self._limits.headers} headers")

    def on_headers_complete(self) -> None:
        """Check the complete head, before its body is read."""
        if self._is_resuming:
            self._is_resuming = False
            return
        grammar = self._grammar
        hosts: list[bytes] = []
        lengths: list[bytes] = []
        codings: list[bytes] = []
        options: list[bytes] = []
        expectations: list[bytes] = []
        for name, value in self._headers:
            match name:
                case b"host":
                    hosts.append(value)
                case b"content-length":
                    lengths.append(value)
                case b"transfer-encoding":
                    codings.append(value)
                case b"connection":
                    options += map(bytes.strip, value.lower().split(b","))
                case b"expect":
                    expectations.append(value.lower())
        version = grammar.get_http_version()
        method = grammar.get_method().decode("ascii")
        if method == "CONNECT":
            self._refuse(405, "CONNECT is not served")
        self._check_host(hosts, version)
        keep_alive = b"close" not in options and (version == "1.1" or b"keep-alive" in options)
        self._content_bytes = self._framing(lengths, codings, version)
        target, path, query = self._judged_target(method)
        self._check_body(self._content_bytes or 0, path)
        expects = self._content_bytes != 0 and version == "1.1"
        self.head = self._fresh_head = RequestHead(
            method=method,
            target=target,
            path=path,
            query=query,
            headers=tuple(self._headers),
            http_version=version,
            keep_alive=keep_alive and grammar.should_keep_alive(),
            expects_continue=expects and b"100-continue" in expectations,
        )

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        if self.head is not None:
            self._check_body(self._body.tell() + len(body), self.head.path)
        self._body.write(body)

    def on_message_complete(self) -> None:
        """Finish a complete message."""
        if self.head is None:
            self._refuse(400, "malformed HTTP: no head")
        if self._grammar.should_upgrade() and self._content_bytes != 0:
            return  # llhttp takes the body for another protocol; ``feed`` resumes it
        self._finished.append(Request(self.head, self._body.getvalue()))
        self._begin()
        self._await_line()

    def _resume_body(self) -> None:
        """Continue with the body of an upgrade request in a new parser that saw no upgrade."""
        length = self._content_bytes
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        self._parser = httptools.HttpRequestParser(self)
        self._is_resuming = True
        self._grammar.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")

    @property
    def _grammar(self) -> httptools.HttpRequestParser:
        if self._parser is None:
            raise RuntimeError("this parser is closed")
        return self._parser

    def _check_host(self, hosts: Sequence[bytes], version: str) -> None:
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._refuse(400, "a request carries exactly one Host header")
        if hosts and not _HOST.fullmatch(hosts[0]):
            self._refuse(400, "invalid Host")

    def _framing(self, lengths: Sequence[bytes], codings: Sequence[bytes], version: str) -> int | None:
        """Return the body's length in bytes, None when chunked; refuse ambiguous or unknown framings."""
        if codings:
            if lengths or len(codings) > 1 or version == "1.0":
                self._refuse(400, "ambiguous body framing")
            if codings[0].lower() != b"chunked":
                self._refuse(501, "only the chunked transfer coding is served")
            return None
        if not lengths:
            return 0
        if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
            self._refuse(400, "invalid Content-Length")
        return int(lengths[0])

    def _judged_target(self, method: str) -> tuple[bytes, str, str]:
        """Return (path as sent, decoded path, query) of the target, also of ``*``."""
        if self._target == b"*" and method == "OPTIONS":
            return b"*", "*", ""
        try:
            return _split_target(self._target)
        except _InvalidTarget:
            self._refuse(400, "invalid request target")
        except UnicodeDecodeError:
            self._refuse(400, "the request target is not UTF-8")

    def _check_body(self, body_bytes: int, path: str) -> None:
        """Refuse a body that is too long for its path; the path's limit is looked up once."""
        if body_bytes <= self._body_fits_bytes:
            return
        most, why = self._limits.body_bytes, ""
        if self._limits.body_limit is not None:
            limit = self._limits.body_limit(path)
            if limit.max_bytes <= most:
                most, why = limit.max_bytes, f", {limit.why}"
        self._body_fits_bytes = most
        if body_bytes > most:
            message = f"the request body is over {most} bytes{why}"
            self._refuse(BodyTooLarge.status_hint, message, code=BodyTooLarge.code)

    def _refuse(self, status: int, reason: str, *, code: str = InvalidRequest.code) -> NoReturn:
        self.fault = self.refusal(status, reason, code)
        raise _Fault(reason)


class _InvalidTarget(Exception):
    """The request target is invalid."""


def _split_target(target: bytes) -> tuple[bytes, str, str]:
    """Return (path as sent, decoded path, query) of an origin-form or absolute-form target.

    Raises :class:`_InvalidTarget`, and UnicodeDecodeError for one that is not UTF-8.
    """
    origin = _ABSOLUTE_FORM.match(target)
    if origin is not None:
        target = target[origin.end() :]
        if not target.startswith(b"/"):
            target = b"/" + target
    if not target.startswith(b"/") or b"#" in target:
        raise _InvalidTarget
    raw_path, _, query = target.partition(b"?")
    path = unquote_to_bytes(raw_path) if b"%" in raw_path else raw_path
    return raw_path, path.decode("utf-8"), query.decode("ascii")


_SHORT = re.compile(b"(?s:%b)*+" % b"|".join(rb"%x\r\n.{%d}\r\n" % (size, size) for size in range(1, 16)))
_LINE = re.compile(rb"0{0,40}+([0-9A-Fa-f]{1,16})(?:;[^\r\n]*+)?\r\n")
_SIZE = re.compile(rb"0*+([0-9A-Fa-f]{0,16})(?![0-9A-Fa-f])")
_LINE_BYTES_KEPT = 64
_LINE_END_BYTES = 2


class ChunkScanner:
    """Finds the end of one chunked body in data that arrives in any parts."""

    def __init__(self) -> None:
        self._skip_bytes = 0  # the rest of a chunk and of the line end after it
        self._line = b""  # the first bytes of an incomplete line
        self._in_trailers = False
        self._over = False  # at the end, or at an invalid line

    def end(self, data: bytes, at: int) -> int:
        """Return the position after the body; the length of ``data`` when all of it belongs to the body."""
        size = len(data)
        if self._over:
            return size
        at += self._skip_bytes
        while at < size:
            if not (self._line or self._in_trailers):
                at = _at_end(_SHORT, data, at)
                line = _LINE.match(data, at)
                chunk_bytes = int(line[1], 16) if line is not None else 0
                if line is not None and chunk_bytes:
                    at = line.end() + chunk_bytes + _LINE_END_BYTES
                    continue
                if at == size:
                    break
            line_end = data.find(b"\n", at)
            if line_end < 0:
                self._line += data[at : at + _LINE_BYTES_KEPT - len(self._line)]
                self._skip_bytes = 0
                return size
            text = self._line + data[at : min(line_end, at + _LINE_BYTES_KEPT - len(self._line))]
            self._line = b""
            at = line_end + 1
            if self._in_trailers:
                if text == b"\r":
                    self._over = True
                    return at
                continue
            found = _SIZE.match(text)
            if found is None or found.end() in (0, _LINE_BYTES_KEPT):
                self._over = True
                return size
            chunk_bytes = int(found[1] or b"0", 16)
            self._in_trailers = chunk_bytes == 0
            if chunk_bytes:
                at += chunk_bytes + _LINE_END_BYTES
        self._skip_bytes = at - size
        return size


def _at_end(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = pattern.match(data, at)
    return at if found is None else found.end()


_HEAD_END = b"\r\n\r\n"
# A chunk of one byte takes five bytes of framing; more than eight per byte is padding.
_FRAMING_PER_BODY_BYTE = 8


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    ENDED = auto()


_IDLE, _HEAD, _BODY, _ENDED = _Phase
"""By name: Python 3.11 takes some 950 instructions to read a member of an enumeration."""


class ServerConnection:
    """Turns received bytes into events; no input of a client makes it raise.

    After a :class:`BadRequest` or :class:`ConnectionClosed` no further event comes, and bytes are dropped.
    """

    def __init__(self, limits: Limits, *, now_s: float) -> None:
        self._limits = limits
        self._parser = MessageParser(limits)
        self._phase = _IDLE
        self._since_s = now_s
        self._body_due_s = now_s
        self._body_counted_bytes = 0
        self._unfed = b""
        self._unfed_at = 0
        self._tail = b""  # the last three bytes: the end of a head may straddle two reads
        self._head_bytes = 0
        self._framing_bytes = 0
        self._chunks = ChunkScanner()
        self._waiting_bytes: deque[int] = deque()  # body lengths of unanswered requests

    @property
    def wants_read(self) -> bool:
        """False while the limit of waiting requests is reached."""
        return not self._is_full()

    @property
    def is_idle(self) -> bool:
        """Whether no request is unanswered and no part of a new one has arrived."""
        return self._phase in (_IDLE, _ENDED) and not self._waiting_bytes

    @property
    def unfinished_bytes(self) -> int:
        """The held bytes of an incomplete request, and of unparsed data."""
        kept_bytes = len(self._unfed) - self._unfed_at + self._head_bytes
        return kept_bytes + (self._parser.body_bytes if self._phase is _BODY else 0)

    def refusal(self, status: int, reason: str, code: str) -> BadRequest:
        """Return a refusal of the request that is being received."""
        return self._parser.refusal(status, reason, code)

    def end(self) -> None:
        """Drop the unfinished request, and ignore all further bytes."""
        self._end()

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Parse bytes from the socket; return the events."""
        if self._phase is _ENDED:
            return []
        self._unfed = self._unfed[self._unfed_at :] + data if self._unfed else data
        self._unfed_at = 0
        return self._parse(now_s)

    def receive_eof(self) -> list[Event]:
        """Handle the client's half-close; it may still read its answers."""
        if self._phase is _ENDED:
            return []
        is_clean = self._phase is _IDLE and not self._unfed
        self._end()
        return [ConnectionClosed(CloseReason.EOF if is_clean else CloseReason.EOF_IN_REQUEST)]

    def request_done(self, now_s: float) -> list[Event]:
        """Count the oldest request as answered, and continue parsing if the limit had stopped it.

        Raises IndexError when no request is unanswered.
        """
        was_full = self._is_full()
        self._waiting_bytes.popleft()
        if self._phase is _ENDED:
            return []
        if was_full or self._phase is _IDLE:
            self._since_s = now_s
        return self._parse(now_s)

    def deadline_s(self) -> float | None:
        """Return the time of the next timeout, on the clock of ``now_s``; None when no timeout runs."""
        if self._phase is _ENDED or self._is_full():
            return None
        if self._phase is _BODY:
            return self._body_due_s
        if self._phase is _HEAD:
            return self._since_s + self._limits.header_s
        if self._waiting_bytes:
            return None
        return self._since_s + self._limits.idle_s

    def on_time(self, now_s: float) -> list[Event]:
        """Check the timeout: no events before the deadline, the end of the connection after it."""
        deadline_s = self.deadline_s()
        if deadline_s is None or now_s < deadline_s:
            return []
        event: Event
        if self._phase is _IDLE:
            event = ConnectionClosed(CloseReason.IDLE)
        elif self._phase is _BODY:
            rate = f"{self._limits.body_bytes_per_s:g} bytes/s"
            reason = f"the request's body took too long to arrive: {self._limits.body_s:g} s below {rate}"
            event = self._parser.refusal(408, reason, UPLOAD_TOO_SLOW)
        else:
            event = self._parser.refusal(408, "the request's headers took too long to arrive")
        self._end()
        return [event]

    def _is_full(self) -> bool:
        waiting = self._waiting_bytes
        if not waiting:
            return False
        return len(waiting) >= self._limits.pipelined_requests or sum(waiting) >= self._limits.body_bytes

    def _parse(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        view = memoryview(self._unfed)
        while self._unfed_at < len(view) and self._phase is not _ENDED and not self._is_full():
            piece = view[self._unfed_at : self._piece_end()]
            taken = self._parser.feed(piece)
            self._unfed_at += taken
            self._after_piece(piece[:taken], now_s, events)
        if self._unfed_at >= len(self._unfed):
            self._unfed, self._unfed_at = b"", 0
        return events

    def _piece_end(self) -> int:
        """Return the end of the next piece. A message ends a piece, so that parsing can pause after it."""
        at, size = self._unfed_at, len(self._unfed)
        if self._phase is _BODY:
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

    def _after_piece(self, piece: memoryview, now_s: float, events: list[Event]) -> None:
        parser = self._parser
        if self._phase is _BODY:
            self._framing_bytes += len(piece)
        else:
            self._head_bytes += len(piece)
            if self._head_bytes > self._limits.header_bytes and parser.fault is None:
                parser.fault = parser.refusal(431, f"the headers are over {self._limits.header_bytes} bytes")
        head = parser.take_head()
        if head is not None:
            events.append(head)
        for request in parser.take_requests():
            request.head_bytes = self._head_bytes
            events.append(request)
            self._waiting_bytes.append(len(request.body))
            self._head_bytes = self._framing_bytes = 0
            self._enter(_IDLE, now_s)
            if not request.head.keep_alive:
                self._end()
                return
        if parser.fault is None and parser.head is not None and parser.body_left_bytes is None:
            allowed = self._limits.header_bytes + (1 + _FRAMING_PER_BODY_BYTE) * parser.body_bytes
            if self._framing_bytes > allowed:
                parser.fault = parser.refusal(400, "chunk framing out of proportion to the body")
        if parser.fault is not None:
            events.append(parser.fault)
            self._end()
        elif parser.head is not None:
            self._enter(_BODY, now_s)
            self._put_off(now_s)
        elif self._head_bytes:
            self._tail = (self._tail + piece[-3:].tobytes())[-3:]
            self._enter(_HEAD, now_s)

    def _enter(self, phase: _Phase, now_s: float) -> None:
        if self._phase is not phase:
            self._phase, self._since_s = phase, now_s
            if phase is _BODY:
                self._body_due_s, self._body_counted_bytes = now_s + self._limits.body_s, 0
                if self._parser.body_left_bytes is None:
                    self._chunks = ChunkScanner()

    def _put_off(self, now_s: float) -> None:
        body_bytes, body_s = self._parser.body_bytes, self._limits.body_s
        arrived_bytes, self._body_counted_bytes = body_bytes - self._body_counted_bytes, body_bytes
        due_s = self._body_due_s + arrived_bytes / self._limits.body_bytes_per_s
        self._body_due_s = min(due_s, now_s + body_s)

    def _end(self) -> None:
        if self._phase is _ENDED:
            return
        self._phase = _ENDED
        self._parser.close()
        self._unfed, self._unfed_at, self._head_bytes = b"", 0, 0
