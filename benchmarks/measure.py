"""Timing loops and quantiles. Standard library alone, for the peers' side runs it too."""

import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Made = TypeVar("Made")

_NS_PER_US = 1000.0


def time_calls(call: Callable[[int], object], n_calls: int) -> list[float]:
    """Call ``call(i)`` for each i below ``n_calls``; return each call's duration in microseconds."""
    clock = time.perf_counter_ns
    samples = [0.0] * n_calls
    for i in range(n_calls):
        began = clock()
        call(i)
        samples[i] = (clock() - began) / _NS_PER_US
    return samples


async def time_awaits(
    make: Callable[[int], Made], call: Callable[[Made], Awaitable[object]], n_calls: int
) -> list[float]:
    """Await ``call(make(i))`` for each i below ``n_calls``; only the await is timed, in microseconds."""
    clock = time.perf_counter_ns
    samples = [0.0] * n_calls
    for i in range(n_calls):
        argument = make(i)
        began = clock()
        await call(argument)
        samples[i] = (clock() - began) / _NS_PER_US
    return samples


def time_fresh(make: Callable[[int], Made], call: Callable[[Made], object], n_calls: int) -> list[float]:
    """Call ``call(make(i))`` for each i below ``n_calls``; only ``call`` is timed, in microseconds."""
    clock = time.perf_counter_ns
    samples = [0.0] * n_calls
    for i in range(n_calls):
        argument = make(i)
        began = clock()
        call(argument)
        samples[i] = (clock() - began) / _NS_PER_US
    return samples


def settle() -> None:
    """Collect garbage, and let what was prepared out of later collections, as a long-lived server would."""
    gc.collect()
    gc.freeze()


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return the smallest sample that ``fraction`` of them do not exceed. Raises ValueError on none."""
    if not samples:
        raise ValueError("samples: none were taken")
    ordered = sorted(samples)
    at = max(0, min(len(ordered) - 1, -int(-fraction * len(ordered) // 1) - 1))
    return ordered[at]
