"""Exponential backoff, without a clock or randomness: callers wait, and add their own jitter."""

from dataclasses import dataclass

DOUBLED_MAX = 32
"""The most doublings: after so many, every limit is reached."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A delay of ``first_s`` seconds, doubled after each further failure in a row, at most ``most_s``."""

    first_s: float
    most_s: float

    def delay_s(self, n_failed: int) -> float:
        """Return the seconds to wait after ``n_failed`` failures in a row, 1 or more."""
        return min(self.most_s, self.first_s * 2.0 ** min(n_failed - 1, DOUBLED_MAX))


@dataclass(slots=True)
class Failures:
    """A count of consecutive failures, and the delay after each."""

    backoff: Backoff
    n: int = 0

    def next_s(self) -> float:
        """Count one more failure; return the seconds to wait after it."""
        self.n += 1
        return self.backoff.delay_s(self.n)

    def reset(self) -> None:
        """Reset the count after a success."""
        self.n = 0
