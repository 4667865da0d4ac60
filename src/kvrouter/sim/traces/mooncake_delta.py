"""The whole prompts of a session with rows that have only the addition of each turn.

A prompt is the one before it, that answer and the turn's addition, token by token. So pieces of a whole
prompt need not be blocks of any row: one that is keeps its name, one that has parts of several is named by
all of them. Answers are not recorded: their tokens are unique.
"""

from array import array

import numpy as np

from kvrouter.core.hashing import mix64
from kvrouter.sim.traces.trace_request import Pieces

PIECES_MAX = 1 << 22
"""The most pieces of a prompt: 32 MiB of names. A row of a few bytes may claim more."""

_SPREAD = 0x9E3779B97F4A7C15


class Dialogue:
    """The growing prompt of one session. ``number`` distinguishes its answers from those of others."""

    def __init__(self, number: int, piece_tokens: int) -> None:
        self._piece_tokens = piece_tokens
        self._own = mix64(mix64(number))
        self._names: Pieces = array("Q")
        self._parts: list[tuple[int, int, int]] = []
        """The parts of the unfinished piece: their block, first token and length."""
        self._n_open = 0
        self._answer_tokens = 0

    def length_with(self, input_tokens: int) -> int:
        """Return the tokens of the prompt after adding ``input_tokens``."""
        return len(self._names) * self._piece_tokens + self._n_open + self._answer_tokens + input_tokens

    def ask(self, names: Pieces, input_tokens: int, output_tokens: int) -> Pieces:
        """Add a turn: blocks of as many tokens in all, and for the next prompt the answer's tokens. Return
        the pieces of the whole prompt.
        """
        self._add_answer()
        n_kept = 0 if self._n_open else input_tokens // self._piece_tokens
        self._names.extend(names[:n_kept])
        for position, name in enumerate(names[n_kept:], n_kept):
            self._add(name, 0, min(self._piece_tokens, input_tokens - position * self._piece_tokens))
        self._answer_tokens = output_tokens
        whole = self._names[:]
        if self._parts:
            whole.append(self._joined())
        return whole

    def _add_answer(self) -> None:
        """Add the answer; its pieces get their names at once."""
        self._own = own = mix64(self._own)
        begun = min(-self._n_open % self._piece_tokens, self._answer_tokens)
        if begun:
            self._add(own, 0, begun)
        n_full, left = divmod(self._answer_tokens - begun, self._piece_tokens)
        places = np.arange(1, n_full + 1, dtype=np.uint64)
        self._names.frombytes((np.uint64(own) + places * np.uint64(_SPREAD)).tobytes())
        if left:
            self._add(own, begun + n_full * self._piece_tokens, left)
        self._answer_tokens = 0

    def _add(self, name: int, first: int, n_tokens: int) -> None:
        """Add a block or a part of one."""
        while n_tokens:
            taken = min(self._piece_tokens - self._n_open, n_tokens)
            self._parts.append((name, first, taken))
            self._n_open += taken
            if self._n_open == self._piece_tokens:
                self._names.append(self._joined())
                self._parts.clear()
                self._n_open = 0
            first += taken
            n_tokens -= taken

    def _joined(self) -> int:
        """Return the name of the piece that is not full, or has just become it."""
        (name, first, _), *others = self._parts
        if not (first or others):
            return name
        joined = 0
        for part in self._parts:
            for value in part:
                joined = mix64(joined ^ value)
        return joined
