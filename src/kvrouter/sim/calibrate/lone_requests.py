"""The start of a fit without known GPUs: the timing of requests that ran alone."""

import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.engine_load import LONE_LEAST
from kvrouter.sim.calibrate.measured_run import F64, MeasuredRun
from kvrouter.sim.calibrate.roofline import MIXED_SHARE, Roofline

LONE_SPREADS = {
    "prefill_linear": 1.0,
    "prefill_base": 1.5,
    "prefill_attention": 2.0,
    "decode_base": 1.0,
    "decode_sequence": 2.0,
    "decode_kv_token": 2.0,
    "mixed_kv_token": 2.0,
}
"""The spread of each figure around the start of the fit, one standard deviation, as a logarithm: wide enough
that the stamps determine the fit."""

SMALL_SHARE = 0.05
"""The share of a step that each figure has at first which lone requests do not show."""


def lone_timing(run: MeasuredRun, n_fitted: int) -> Roofline:
    """Return a timing that explains those of the first ``n_fitted`` requests that ran alone, and the
    engine's tokens of KV.

    Raises ConfigError where fewer than three ran alone.
    """
    alone = _alone(run)[:n_fitted]
    if np.count_nonzero(alone) < LONE_LEAST:
        raise ConfigError(
            f"requests: {np.count_nonzero(alone)} of {n_fitted} ran alone; {LONE_LEAST} or more must",
            param="requests",
        )
    stamps, at = run.stamps, np.flatnonzero(alone)
    began = np.where(np.isnan(stamps.scheduled), stamps.arrival, stamps.scheduled)
    first_ms = 1e3 * (stamps.first - began)[at]
    tokens = run.input_tokens[at].astype(np.float64)
    token_ms = _slope(tokens, first_ms)
    base_ms = max(float(np.median(first_ms - token_ms * tokens)), SMALL_SHARE * float(first_ms.min()))
    between = run.output_tokens[at] - 1
    several = between > 0
    if not several.any():
        raise ConfigError("requests: no answer has more than one token", param="requests")
    step_ms = 1e3 * float(np.median((stamps.last - stamps.first)[at][several] / between[several]))
    longest = float(tokens.max())
    kv_token_ms = SMALL_SHARE * step_ms / longest
    timing = Timing(
        prefill_quadratic=0.0,
        prefill_linear=token_ms,
        prefill_base=base_ms,
        prefill_attention=2.0 * SMALL_SHARE * token_ms / longest,  # each token attends to half of them
        decode_quadratic=0.0,
        decode_linear=0.0,
        decode_base=step_ms,
        decode_min=min(1.0, step_ms),
        decode_sequence=SMALL_SHARE * step_ms / 16,
        decode_kv_token=kv_token_ms,
        mixed_kv_token=MIXED_SHARE * kv_token_ms,
    )
    return Roofline(timing, *_kv_tokens(run))


def _alone(run: MeasuredRun) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether each request had ended before another one came, and came after all others had ended."""
    arrival, last = run.stamps.arrival, run.stamps.last
    before = np.concatenate(([-np.inf], np.maximum.accumulate(last)[:-1]))
    after = np.concatenate((arrival[1:], [np.inf]))
    return (arrival >= before) & (last <= after)


def _slope(x: F64, y: F64) -> float:
    """Return the median of the slopes between all pairs, which no single point moves (Theil and Sen)."""
    left, right = np.triu_indices(len(x), 1)
    differ = x[left] != x[right]
    slopes = (y[right] - y[left])[differ] / (x[right] - x[left])[differ]
    least = SMALL_SHARE * float(np.median(y / x))
    return max(least, float(np.median(slopes))) if len(slopes) else float(np.median(y / x))


def _kv_tokens(run: MeasuredRun) -> tuple[int, tuple[str, ...]]:
    flags = run.meta.engine_kwargs
    if flags.num_gpu_blocks_override is not None:
        return flags.num_gpu_blocks_override * flags.block_size, ()
    all_tokens = int(run.input_tokens.sum() + run.output_tokens.sum())
    return all_tokens + flags.block_size * run.n_requests, (
        "the engine's KV blocks: enough for all requests at once; it does not say how many it has",
    )
