"""Axes: from a value to its place between 0 and 1, with ticks at round numbers."""

from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

TICKS = 6
"""The approximate maximum number of ticks of an axis."""

LADDERS = ((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
"""Round numbers between two powers of ten, from many to few."""

LOG_FROM = 20.0
"""How many times the smallest value the largest is, for a scale over time to be logarithmic."""


class Tick(NamedTuple):
    """A value with its label."""

    value: float
    label: str


class Scale(NamedTuple):
    """From ``low`` to ``high``, by their logarithms where ``is_log``."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value, 0 at ``low``, 1 at ``high``; outside values move to the end."""
        value = min(self.high, max(self.low, value))
        if self.is_log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def plain(value: float) -> str:
    """Return a number with three digits at least, and never with an exponent."""
    digits = 0 if not value else max(0, 2 - floor(log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def milliseconds(value: float) -> str:
    """Return a time in the unit that reads best."""
    if not value:
        return "0"
    if value >= 1e3:
        return f"{plain(value / 1e3)} s"
    return f"{plain(value)} ms"


def percent(value: float) -> str:
    """Return a share of 1 as per cent."""
    return f"{plain(value * 100.0)} %"


def linear(high: float, label: Callable[[float], str], *, low: float = 0.0) -> Scale:
    """Return a scale with round ends, from ``low`` or below to ``high`` or above."""
    step = _round_step((high - low or abs(high) or 1.0) / (TICKS - 1))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(Tick(at * step, label(at * step)) for at in range(first, last + 1))
    return Scale(first * step, last * step, ticks)


def shares() -> Scale:
    """Return a scale from 0 to 100 %."""
    return Scale(0.0, 1.0, tuple(Tick(at / 4, percent(at / 4)) for at in range(5)))


def clock(end_s: float) -> Scale:
    """Return a scale from 0 to ``end_s`` exactly, in seconds, minutes or hours."""
    unit, name = next((unit, name) for unit, name, up_to in _CLOCKS if end_s <= up_to)
    step = _round_step(end_s / unit / TICKS)
    at = range(floor(end_s / unit / step + 1e-9) + 1)
    return Scale(
        0.0, end_s, tuple(Tick(n * step * unit, f"{plain(n * step)} {name}" if n else "0") for n in at)
    )


def latencies(values: Sequence[float]) -> Scale:
    """Return a logarithmic scale over ``values`` in milliseconds, a linear one where they are too near to
    each other or not above 0.
    """
    low, high = min(values), max(values)
    if low > 0.0:
        low_end, high_end = low / 1.05, high * 1.05
        for ladder in LADDERS:
            found = _round_between(low_end, high_end, ladder)
            if 3 <= len(found) <= TICKS:
                return Scale(
                    low_end, high_end, tuple(Tick(value, milliseconds(value)) for value in found), is_log=True
                )
        decades = _round_between(low_end, high_end, LADDERS[-1])
        if len(decades) > TICKS:
            kept = decades[:: ceil(len(decades) / TICKS)]
            return Scale(
                low_end, high_end, tuple(Tick(value, milliseconds(value)) for value in kept), is_log=True
            )
    return linear(high, milliseconds, low=low)


def latencies_over_time(values: Sequence[float]) -> Scale:
    """Return a scale from 0, or a logarithmic one where ``values`` are far from each other."""
    if min(values) > 0.0 and max(values) >= LOG_FROM * min(values):
        return latencies(values)
    return linear(max(values), milliseconds)


_CLOCKS = ((1.0, "s", 180.0), (60.0, "min", 3 * 3_600.0), (3_600.0, "h", float("inf")))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, … times a power of ten that is not below ``least``."""
    power = 10.0 ** floor(log10(least))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= least * (1.0 - 1e-9))


def _round_between(low: float, high: float, ladder: Sequence[float]) -> list[float]:
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in ladder if low <= step * 10.0**power <= high]
