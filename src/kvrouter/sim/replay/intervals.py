"""Confidence intervals of means over few samples, by Student's t."""

from functools import lru_cache
from math import atan, cos, pi, sin, sqrt

CONFIDENCE = 0.95
"""The confidence of an interval."""


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
