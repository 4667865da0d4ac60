"""The batches in which an engine runs requests: how many decode at once, and what a prefill finds running."""

from typing import NamedTuple

import numpy as np

from kvrouter.sim.measured_run import F64, MeasuredRun, Stamps

POINTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The quantiles that stand for a distribution."""


class Batches(NamedTuple):
    """What the steps of a run have in them.

    ``decoding`` are quantiles of the sequences that decode in a step, over all tokens; ``prefilled`` are
    quantiles of the prompt tokens that a step computes, over all requests. ``alone`` is the share of prefills
    in steps in which nothing decodes.
    """

    decoding: F64
    prefilled: F64
    alone: float


def batches_of(run: MeasuredRun, stamps: Stamps, n_ranks: int = 1) -> Batches:
    """Return the batches of requests with these stamps, on one of the engine's ``n_ranks``."""
    ended = np.where(np.isnan(stamps.last), stamps.first, stamps.last)
    times = np.concatenate((stamps.first, ended))
    changes = np.concatenate((np.ones(run.n_requests), -np.ones(run.n_requests)))
    order = np.argsort(times, kind="stable")
    lasts = np.diff(times[order])
    running = np.cumsum(changes[order])[:-1]
    found = np.searchsorted(np.sort(stamps.first), stamps.scheduled, side="right") - np.searchsorted(
        np.sort(ended), stamps.scheduled, side="right"
    )
    limit = run.meta.engine_kwargs.max_num_batched_tokens
    return Batches(
        decoding=np.maximum(1.0, _quantiles(running, lasts * running) / n_ranks),
        prefilled=np.quantile(np.minimum(run.computed_tokens, limit), POINTS),
        alone=float(np.mean(found < n_ranks)),
    )


def _quantiles(values: F64, weights: F64) -> F64:
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(weights[order])
    if not len(values) or shares[-1] <= 0.0:
        return np.ones(len(POINTS))
    at = np.searchsorted(shares, np.array(POINTS) * shares[-1])
    found: F64 = values[order][at]
    return found
