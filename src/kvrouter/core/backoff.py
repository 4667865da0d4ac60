"""Exponential backoff. It knows no clock and draws nothing: callers wait, and add their own jitter."""

from dataclasses import dataclass

DOUBLED_MAX = 32
"""Beyond so many doublings every limit is reached: larger powers would only cost digits."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """``first_s`` seconds after the first failure, twice as long after each further one, up to ``most_s``."""

    first_s: float
    most_s: float

    def delay_s(self, n_failed: int) -> float:
        """Return the seconds to wait after ``n_failed`` failures in a row, 1 or more."""
        return min(self.most_s, self.first_s * 2.0 ** min(n_failed - 1, DOUBLED_MAX))


@dataclass(slots=True)
class Failures:
    """Failures in a row, and how long to wait after each."""

    backoff: Backoff
    n: int = 0

    def next_s(self) -> float:
        """Count one more failure; return the seconds to wait after it."""
        self.n += 1
        return self.backoff.delay_s(self.n)

    def reset(self) -> None:
        """It went well."""
        self.n = 0
