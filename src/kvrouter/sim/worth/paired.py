"""Differences of two replays of the same requests, part by part, with Student's intervals."""

from collections.abc import Sequence
from math import sqrt

import msgspec

from kvrouter.sim.replay.intervals import CONFIDENCE, student_t


class Difference(msgspec.Struct, frozen=True):
    """A mean difference. The true one is closer to it than ``within`` with 95 % confidence, and all that a
    choice is made of are closer than their ``within_all`` at once.
    """

    mean: float
    within: float
    within_all: float


def difference(values: Sequence[float], n_compared: int) -> Difference | None:
    """Return the mean of ``values``, one of each part, as one of ``n_compared`` for a choice.

    The wider interval is Bonferroni's: each of the differences may be wrong that many times more rarely. None
    for fewer than two parts, which have no spread.
    """
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    error = sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    wrong = (1.0 - CONFIDENCE) / max(1, n_compared)
    return Difference(mean, error * student_t(CONFIDENCE, n - 1), error * student_t(1.0 - wrong, n - 1))
