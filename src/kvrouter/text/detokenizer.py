"""Incremental detokenizers, stop strings, and the text of one answer.

Whatever the chunking, the texts of all pushes and of ``finish`` together are the text of all ids decoded at
once. Byte-level vocabularies (all current large models) take a path of table look-ups, exact for any ids.
Others decode a short window of ids again at each push, which is exact wherever the bytes are valid UTF-8.

The rule does not depend on how the text is cut: the stop string that is complete first ends the stream; of
several that end at the same character, the longest. The stop string and all after it are not given out.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from kvrouter.core.errors import InvalidRequest
from kvrouter.text.token_lengths import TokenPieces
from kvrouter.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HELD_TOKENS_MAX = 16
"""A character has at most four bytes; what is broken after so many tokens is broken for good."""


class Detokenizer(Protocol):
    """One stream of token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain; bytes of an unfinished character are held back."""
        ...

    def finish(self) -> str:
        """Return what was held back, with U+FFFD for bytes that never became a character."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> Detokenizer:
    """Return a detokenizer for the ids that follow ``context``, whose own text was given out before.

    A stream that is resumed passes the ids that it has already delivered.
    """
    if tokenizer.pieces is not None:
        return ByteLevelDetokenizer(tokenizer.pieces, context=context)
    return WindowDetokenizer(tokenizer, context=context)


class ByteLevelDetokenizer:
    """Joins the pieces of tokens; a decoder's state is at most three bytes."""

    __slots__ = ("_held", "_raw", "_whole")

    def __init__(self, pieces: TokenPieces, *, context: Sequence[int] = ()) -> None:
        self._whole, self._raw = pieces
        self._held = b""
        if context:
            self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        if not self._held:
            try:
                return "".join(map(self._whole.__getitem__, token_ids))
            except KeyError:
                # Part of a character, or an id that means nothing: the bytes decide.
                pass
        raw = self._raw
        pending = self._held + b"".join([raw.get(token_id, b"") for token_id in token_ids])
        text, used_bytes = codecs.utf_8_decode(pending, "replace", False)
        self._held = pending[used_bytes:]
        return text

    def finish(self) -> str:
        """Return what was held back."""
        text = self._held.decode(errors="replace")
        self._held = b""
        return text


class WindowDetokenizer:
    """Decodes the ids since the last text but one, and gives out what the newest ids added to it."""

    __slots__ = ("_base_chars", "_context", "_held", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._base_chars = 0
        self._held: list[int] = []
        # From the start: a window that began inside a character would spoil what follows.
        self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        # One by one: only so does every end of a character show.
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return what was held back."""
        return self._give_out(self._tokenizer.decode(self._context + self._held))

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._tokenizer.decode(self._context + self._held)
        if len(self._held) < HELD_TOKENS_MAX and (
            text.endswith(REPLACEMENT) or len(text) <= self._base_chars
        ):
            return ""
        return self._give_out(text)

    def _give_out(self, text: str) -> str:
        new = text[self._base_chars :]
        chars = len(self._tokenizer.decode(self._held))
        if chars:
            # Ids without text (special ones) make no context: a decoder would strip the space that follows.
            self._context = self._held
            self._base_chars = chars
        self._held = []
        return new


STOPS_MAX = 4
STOP_CHARS_MAX = 256


def stops_fit(stops: Sequence[str]) -> bool:
    """Whether a :class:`StopMatcher` takes these."""
    return len(stops) <= STOPS_MAX and all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops)


class StopMatcher:
    """Watches one stream. Text that may still turn out to be a stop string is held back."""

    __slots__ = ("_held", "_hold_chars", "_openers", "_prefixes", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Take up to ``STOPS_MAX`` strings of 1 to ``STOP_CHARS_MAX`` characters, else ``InvalidRequest``."""
        if len(stops) > STOPS_MAX:
            raise InvalidRequest(f"stop: at most {STOPS_MAX} strings, not {len(stops)}", param="stop")
        for stop in stops:
            if not 0 < len(stop) <= STOP_CHARS_MAX:
                raise InvalidRequest(
                    f"stop: a string has 1 to {STOP_CHARS_MAX} characters, not {len(stop)}", param="stop"
                )
        # The longest first: of equal ends, the earliest start wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._prefixes = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._openers = (
            re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]") if stops else None
        )
        self._hold_chars = len(self._stops[0]) - 1 if stops else 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the stream."""

    @property
    def is_idle(self) -> bool:
        """Whether there is no stop string, so that all text may be given out."""
        return self._openers is None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be given out and, once it has come, the stop string."""
        if self._openers is None:
            return text, None
        if self.stopped is not None:
            return "", self.stopped
        pending = self._held + text
        if self._openers.search(pending) is None:
            return pending, None
        start = self._find(pending)
        if start is not None:
            self._held = ""
            return pending[:start], self.stopped
        keep_from = self._hold_from(pending)
        self._held = pending[keep_from:]
        return pending[:keep_from], None

    def finish(self) -> str:
        """Return what was held back: the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, pending: str) -> int | None:
        """Note the stop string that is complete first and return where it starts."""
        best_end = len(pending) + 1
        best_start = None
        for stop in self._stops:
            start = pending.find(stop, 0, best_end - 1)
            if start >= 0:
                best_start, best_end, self.stopped = start, start + len(stop), stop
        return best_start

    def _hold_from(self, pending: str) -> int:
        """Return where the longest end of ``pending`` that begins a stop string starts."""
        if self._openers is not None:
            for opener in self._openers.finditer(pending, max(0, len(pending) - self._hold_chars)):
                if pending[opener.start() :] in self._prefixes:
                    return opener.start()
        return len(pending)


class AnswerText:
    """An answer's text: what is certain, piece by piece, and nothing after a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "stopped")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.stopped = False
        """Whether a stop string ended the answer: nothing after it is given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with these tokens; a stop string in it sets ``stopped``."""
        text, stopped = self._matcher.push(self._detokenizer.push(token_ids))
        self.stopped = self.stopped or stopped is not None
        return text

    def finish(self) -> str:
        """Return what was held back: no more tokens come."""
        text, stopped = self._matcher.push(self._detokenizer.finish())
        if stopped is None:
            return text + self._matcher.finish()
        self.stopped = True
        return text
