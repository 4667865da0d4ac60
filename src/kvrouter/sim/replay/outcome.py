"""The outcome of one replayed request."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvrouter.core.ids import WorkerId


class Move(NamedTuple):
    """KV that went from a prefill worker to a decode worker: the domains where they were then, and bytes."""

    src: Mapping[str, str]
    dst: Mapping[str, str]
    bytes: int


class Outcome(msgspec.Struct, kw_only=True):
    """One request, from its arrival to its end. Moments are seconds from the replay's start.

    ``first_s`` and ``last_s`` are its first and last output token, None without output; ``cached_tokens`` is
    the prefill engine's own count, ``predicted_tokens`` that of the decision. ``ceiling_tokens`` are those of
    its prompt that an endless cache shared by all would have held. ``moves`` is the KV that its decode
    workers got, of each attempt. ``error`` is the code of its error, "" if it ended well. ``is_critical``:
    whether it has a strict priority above 0.
    """

    number: int
    arrived_s: float
    input_tokens: int
    output_tokens: int
    ceiling_tokens: int
    placed_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    generated_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    prefill: WorkerId | None = None
    decode: WorkerId | None = None
    crosses: bool = False
    attempts: int = 0
    error: str = ""
    reason: str = ""
    is_critical: bool = False
    moves: list[Move] = []

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.generated_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.generated_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the arrival to the last token; None where it did not end well."""
        return None if self.error or self.last_s is None else self.last_s - self.arrived_s
