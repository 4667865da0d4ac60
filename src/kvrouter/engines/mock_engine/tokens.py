"""The mock model: its next token is a function of the seed and of every token before it.

The state is a polynomial over the tokens modulo 2**64, so a long prompt is one vector product, a further
token is one multiplication, and a sequence that goes on at another engine (with the same tokens) goes on
alike.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrouter.core.hashing import finish64
from kvrouter.core.requests import Sampling, TokenBuffer

MASK = (1 << 64) - 1
STEP = 6364136223846793005
"""Knuth's multiplier of MMIX; odd, so that no power of it vanishes modulo 2**64."""

SPREAD = 0x9E3779B97F4A7C15


class TokenModel:
    """Draws tokens from ``token_ids``; ``state`` summarises a sequence so far."""

    def __init__(
        self, *, model_seed: int, token_ids: Sequence[int], eos_token_id: int, eos_every: int | None
    ) -> None:
        self._model_seed = model_seed
        self._token_ids = token_ids
        self._eos_token_id = eos_token_id
        self._eos_every = eos_every
        self._powers: npt.NDArray[np.uint64] = np.ones(1, dtype=np.uint64)

    def state(self, tokens: TokenBuffer, sampling: Sampling) -> int:
        """Return the state after ``tokens``. A sampling seed counts only when tokens are drawn at random."""
        origin = finish64(self._model_seed & MASK)
        if sampling.temperature > 0.0 and sampling.seed is not None:
            origin = finish64(origin ^ finish64((sampling.seed + SPREAD) & MASK))
        n = len(tokens)
        self._grow_powers(n)
        terms = np.frombuffer(tokens, dtype=np.uint32).astype(np.uint64) + np.uint64(1)
        total = int(np.dot(terms, self._powers[:n][::-1])) if n else 0
        return (origin * pow(STEP, n, MASK + 1) + total) & MASK

    def draw(self, state: int, count: int, *, eos_from: int | None) -> tuple[list[int], int]:
        """Return up to ``count`` next tokens and the state after them.

        An end of sequence may come at index ``eos_from`` or later (never when None) and is the last token.
        """
        ids, n_ids, eos_every = self._token_ids, len(self._token_ids), self._eos_every
        drawn: list[int] = []
        for index in range(count):
            mixed = ((state ^ (state >> 32)) * SPREAD) & MASK
            mixed ^= mixed >> 29
            token = ids[mixed % n_ids]
            ends = (
                eos_every is not None
                and eos_from is not None
                and index >= eos_from
                and finish64(mixed) % eos_every == 0
            )
            if ends:
                token = self._eos_token_id
            drawn.append(token)
            state = (state * STEP + token + 1) & MASK
            if ends:
                break
        return drawn, state

    def _grow_powers(self, n: int) -> None:
        if len(self._powers) >= n:
            return
        size = max(n, 2 * len(self._powers), 1024)
        powers = np.full(size, STEP, dtype=np.uint64)
        powers[0] = 1
        self._powers = np.multiply.accumulate(powers)
