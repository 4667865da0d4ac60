"""Token ids as they arrive, to text that never ends inside a character.

Whatever the chunking, the texts of all pushes and of ``finish`` together are the text of all ids decoded at
once. Byte-level vocabularies (all current large models) take a path of table look-ups, exact for any ids.
Others decode a short window of ids again at each push, which is exact wherever the bytes are valid UTF-8.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvrouter.text.pieces import TokenPieces
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
