"""Server-sent events: a stream of bytes cut into events, and what of them was asked for the router's sake
taken out.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvrouter.core.requests import FinishReason
from kvrouter.engines.openai.answer_events import (
    AnswerEvent,
    Unasked,
    UnreadEvent,
    exists_for_tokens,
    with_fingerprint,
    without_token_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """How an answer is read.

    ``passes_raw``: the client gets the engine's bytes, else only tokens are wanted. ``added_token_ids`` and
    ``added_usage`` were requested for the router, and are cut out again; ``unasked`` are the engine's bytes
    in place of tokens that are not requested, and ``cleaned`` returns a whole answer without the other
    additions. ``shows_aborts``: the last event of an aborted stream reports that to its client; otherwise the
    stream ends with an error. ``has_choices``: its events are those of chats and completions; of other ones
    only the end is read.
    """

    passes_raw: bool
    added_token_ids: bool = False
    unasked: Unasked = Unasked.NULL
    added_usage: bool = False
    cleaned: Callable[[bytes], bytes] = bytes
    shows_aborts: bool = True
    has_choices: bool = True

    def finish_of(self, reported: FinishReason | None) -> FinishReason | None:
        """Return the finish of a complete answer. A client that gets the engine's bytes has all of them, with
        any reason or without one.
        """
        if not self.passes_raw:
            return reported
        return reported if reported is FinishReason.LENGTH else FinishReason.STOP


BEHIND_MAX_BYTES = 4096
"""So many bytes of comments wait behind an answer's last event for the usage, and no more."""


class RawEvents:
    """Cuts the router's additions out of the events of one stream.

    An engine that is asked for the usage writes its fingerprint next to it, and otherwise into the last event
    of the answer: that event waits for the usage, which follows it, and gets the fingerprint back. An engine
    that writes a usage into every event does so for every client: the last one is then the client's too.
    """

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._takes_usage = reading.added_usage
        self._last = b""
        self._behind: list[bytes] = []
        self._behind_bytes = 0

    @property
    def is_waiting(self) -> bool:
        """Whether bytes wait here: the tokens that belong to them wait too."""
        return bool(self._last)

    def take(self, event: AnswerEvent, raw: bytes) -> bytes:
        """Return what of ``raw``, and of what waits, goes to the client now."""
        if event.choices and event.usage is not None and not isinstance(event, UnreadEvent):
            self._takes_usage = False
        if self._takes_usage and (event.is_usage_alone or self._is_empty_usage(event, raw)):
            return self._released(event.system_fingerprint)
        if self._reading.added_token_ids:
            if exists_for_tokens(event, raw):
                return self._released(None)
            raw = without_token_ids(raw, self._reading.unasked)
        if self._takes_usage and event.finish is not None and len(event.choices) == 1:
            released, self._last = self._released(None), raw
            return released
        return self._released(None) + raw

    def _is_empty_usage(self, event: AnswerEvent, raw: bytes) -> bool:
        """Whether it is the event of the requested usage without a usage: it has an empty list of choices."""
        is_read = not isinstance(event, UnreadEvent) and b'"choices"' in raw
        return is_read and self.is_waiting and not event.choices and event.error is None

    def hold(self, comment: bytes) -> bytes:
        """A comment came behind bytes that wait; return what waits no longer, as there are many."""
        self._behind.append(comment)
        self._behind_bytes += len(comment)
        return self._released(None) if self._behind_bytes > BEHIND_MAX_BYTES else b""

    def end(self) -> bytes:
        """Return the event that still waits: no usage follows."""
        return self._released(None)

    def _released(self, fingerprint: str | None) -> bytes:
        raw, self._last = self._last, b""
        if raw and fingerprint is not None:
            raw = with_fingerprint(raw, fingerprint)
        if self._behind:
            raw += b"".join(self._behind)
            self._behind.clear()
            self._behind_bytes = 0
        return raw


EVENT_MAX_BYTES = 4 * 1024 * 1024
"""The longest event that is read; a chunk with log probabilities of a long answer is far below."""

DONE = b"[DONE]"

_BLANK_LINE = re.compile(rb"\n(?:\n|\r\n?)|\r\r\n?")
"""The end of a line and a blank one behind it: lines end in ``\\r\\n``, ``\\n`` or ``\\r``."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

CutEvent = tuple[bytes, bytes | None]
"""The bytes of an event, and its data: empty of comments alone, None of a piece of one that is not read."""


class EventCutter:
    """Cuts a stream of bytes into events, as WHATWG's HTML standard does, section 9.2.6. All bytes come out
    again, in order; an event is complete at its blank line, so that a ``\n`` that comes after its ``\r``
    begins the next event.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._is_first = True
        self._is_long = False

    def push(self, piece: bytes) -> Iterator[CutEvent]:
        """Yield the events that ``piece`` completes; an event over :data:`EVENT_MAX_BYTES` comes in the
        pieces received so far.
        """
        rest = self._rest
        if rest:
            scan_at = len(rest) - 1
            rest += piece
            found = _BLANK_LINE.search(rest, scan_at)
            data = b"" if found is None else bytes(rest)
            if found is not None:
                rest.clear()
        else:
            data, found = piece, _BLANK_LINE.search(piece)
        begin = 0
        while found is not None:
            end = found.end()
            yield self._event(data[begin:end])
            begin = end
            found = _BLANK_LINE.search(data, begin)
        rest += data[begin:]
        if len(rest) > EVENT_MAX_BYTES or (self._is_long and len(rest) > 1):
            self._is_long = True
            yield bytes(rest[:-1]), None
            del rest[:-1]

    def end(self) -> CutEvent:
        """Return what came behind the last blank line."""
        rest = bytes(self._rest)
        self._rest.clear()
        return self._event(rest)

    def _event(self, raw: bytes) -> CutEvent:
        if self._is_long:
            self._is_long = False
            return raw, None
        written = raw
        if self._is_first:
            self._is_first = False
            written = raw.removeprefix(_BYTE_ORDER_MARK)
        lines = [line[5:].strip() for line in written.splitlines() if line.startswith(b"data:")]
        return raw, lines[0] if len(lines) == 1 else b"\n".join(lines)
