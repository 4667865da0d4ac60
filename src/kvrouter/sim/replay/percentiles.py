"""Percentiles of as many samples as they need, for every report of replays."""

import numpy as np
import numpy.typing as npt


def samples_needed(percent: int) -> int:
    """Return of how many samples a percentile is one: with fewer, none of them lies beyond it."""
    return -(-100 // (100 - percent))


def percentile(values: npt.NDArray[np.float64], percent: int) -> float | None:
    """Return a percentile; None of too few values, where it would be the maximum under another name."""
    if len(values) < samples_needed(percent):
        return None
    return float(np.percentile(values, percent))
