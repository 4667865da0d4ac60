"""Differences of two replays of the same requests, part by part, with Student's intervals."""

from collections.abc import Sequence
from functools import lru_cache
from math import atan, cos, pi, sin, sqrt

import msgspec

CONFIDENCE = 0.95
"""The confidence of an interval."""


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


@lru_cache
def student_t(confidence: float, freedom: int) -> float:
    """Return the distance from 0 that Student's t with ``freedom`` degrees exceeds with 1 - ``confidence``.

    0 ≤ ``confidence`` < 1.
    """
    low, high = 0.0, 1.0
    while _within_t(high, freedom) < confidence:
        low, high = high, 2.0 * high
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within_t(middle, freedom) < confidence else (low, middle)
    return high


def _within_t(t: float, freedom: int) -> float:
    """Return the chance that Student's t lies between -t and t: the finite sums for whole degrees of freedom
    (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    angle = atan(t / sqrt(freedom))
    square = cos(angle) ** 2
    is_odd = freedom % 2
    term = total = cos(angle) if is_odd else 1.0
    for step in range(3 if is_odd else 2, freedom - 1, 2):
        term *= square * (step - 1) / step
        total += term
    if not is_odd:
        return sin(angle) * total
    return 2.0 / pi * (angle + (sin(angle) * total if freedom > 1 else 0.0))
