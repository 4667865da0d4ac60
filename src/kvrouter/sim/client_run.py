"""A measured run from what a client saw of a live engine, and what the engine's metrics add."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.sim.measured_run import F64, MeasuredRun, RunHardware, RunMeta, Stamps

WAY_SHARE = 0.5
"""The largest share of a request's TTFT that is taken for its way to the scheduler."""


class ClientRequest(NamedTuple):
    """One request: tokens, and seconds of the client's clock.

    ``queue_s`` and ``prefill_s`` are the engine's own: how long it waited for the scheduler, and how long it
    took from there to its first token. They are None where the engine does not say, as of each request that
    did not run alone: metrics have sums.
    """

    prompt_tokens: int
    answer_tokens: int
    sent_s: float
    first_s: float
    last_s: float
    queue_s: float | None = None
    prefill_s: float | None = None


def client_run(
    meta: RunMeta, hardware: RunHardware | None, requests: Sequence[ClientRequest], *, round_trip_s: float
) -> MeasuredRun:
    """Return the run of ``requests``, by arrival, on the client's clock from the first arrival on.

    A request arrives at the scheduler later than it was sent: by what its TTFT was longer than the engine's
    own times, where these are known; by the median of these ways for other requests; and by ``round_trip_s``,
    which a small question takes, where the engine says no times. Stamps of the scheduler that nobody says are
    NaN. Raises ConfigError for stamps that no stream of tokens has.
    """
    for number, request in enumerate(requests):
        _check(number, request)
    sent, first, last = (
        np.array([getattr(request, name) for request in requests]) for name in ("sent_s", "first_s", "last_s")
    )
    queue, prefill = (
        np.array([np.nan if value is None else value for value in column])
        for column in ([each.queue_s for each in requests], [each.prefill_s for each in requests])
    )
    queue = np.where(np.isnan(prefill), np.nan, queue)
    scheduled = np.maximum(sent, first - prefill)
    queued = np.maximum(sent, scheduled - queue)
    ways: F64 = (queued - sent)[~np.isnan(queued)]
    way_s = float(np.median(ways)) if len(ways) else round_trip_s
    arrival = np.where(np.isnan(queued), sent + np.minimum(way_s, WAY_SHARE * (first - sent)), queued)
    scheduled = np.where(np.isnan(queued), np.nan, scheduled)
    order = np.argsort(arrival, kind="stable")
    began = float(arrival[order[0]])
    columns = (arrival, queued, scheduled, first, last)
    return MeasuredRun(
        meta=meta,
        hardware=hardware,
        input_tokens=np.array([request.prompt_tokens for request in requests], np.int64)[order],
        output_tokens=np.array([request.answer_tokens for request in requests], np.int64)[order],
        stamps=Stamps(*(column[order] - began for column in columns)),
    )


def _check(number: int, request: ClientRequest) -> None:
    where = f"request {number + 1}"
    if request.prompt_tokens < 1 or request.answer_tokens < 1:
        raise ConfigError(
            f"{where}: usage says {request.prompt_tokens} prompt and {request.answer_tokens} answer tokens",
            param="usage",
        )
    if request.first_s <= request.sent_s:
        raise ConfigError(f"{where}: its first token came before it was sent", param="first_s")
    if request.answer_tokens > 1 and request.last_s <= request.first_s:
        raise ConfigError(
            f"{where}: its {request.answer_tokens} tokens came at once: something on the way to the engine "
            "holds streams back",
            param="last_s",
        )
