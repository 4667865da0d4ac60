"""Times of arrival for traces that have none."""

from collections.abc import Iterator

import numpy as np

from kvrouter.core.errors import ConfigError

RATE_MIN, RATE_MAX = 1e-6, 1e6

MISSING = "is missing, so nothing says when requests came: --rate-per-s N draws it"

_SEED = 0
"""The draws are part of the trace: they are the same in every replay, whatever its seed."""


def check_rate(rate_per_s: float) -> None:
    """Raise ConfigError for a rate at which no trace can be drawn."""
    if not RATE_MIN <= rate_per_s <= RATE_MAX:
        raise ConfigError(
            f"rate-per-s: {rate_per_s} is not from {RATE_MIN:g} to {RATE_MAX:g}", param="rate-per-s"
        )


def drawn_arrivals(rate_per_s: float) -> Iterator[float]:
    """Yield the seconds from the first request on: a Poisson process."""
    draws, at_s = np.random.default_rng(_SEED), 0.0
    while True:
        yield at_s
        at_s += float(draws.exponential(1.0 / rate_per_s))


def drawn_note(rate_per_s: float) -> str:
    """Return a note for reports on a trace with such arrivals."""
    return f"the trace has no times: --rate-per-s draws arrivals, {rate_per_s:g} a second on average"
