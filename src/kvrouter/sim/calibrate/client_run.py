"""A measured run from a client's observation of a live engine, and the engine's metrics."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.sim.calibrate.measured_run import F64, MeasuredRun, RunHardware, RunMeta, Stamps

WAY_SHARE = 0.5
"""The largest share of a request's TTFT that is taken for its way to the scheduler."""


AT_ONCE_SHARE = 0.1
"""The largest share of answers with all tokens at once: a busy server or client holds one back now and then,
a proxy in between holds back all."""


class ClientRequest(NamedTuple):
    """One request: tokens, and seconds of the client's clock.

    ``queue_s`` and ``prefill_s`` are the engine's own times: in the queue, and from there to its first token.
    They are None if the engine does not report them: metrics have sums, which are of one request if it ran
    alone. For requests that ran together, the sums give ``way_share``: the share of their total TTFT before
    the scheduler or behind it.
    """

    prompt_tokens: int
    answer_tokens: int
    sent_s: float
    first_s: float
    last_s: float
    queue_s: float | None = None
    prefill_s: float | None = None
    way_share: float | None = None

    @property
    def came_at_once(self) -> bool:
        """Whether several tokens came with the first: their times are unknown."""
        return self.answer_tokens > 1 and self.last_s <= self.first_s


def client_run(
    meta: RunMeta, hardware: RunHardware | None, requests: Sequence[ClientRequest], *, round_trip_s: float
) -> MeasuredRun:
    """Return the run of ``requests``, by arrival, on the client's clock from the first arrival on.

    A request arrives at the scheduler later than it was sent: by the difference of its TTFT and the engine's
    own times, if these are known; by the known share of the requests that it ran with; by the median of all
    known delays, for other requests; and by ``round_trip_s``, the time of a small request, if the engine
    reports no times. Unknown stamps of the scheduler are NaN.

    Raises ConfigError for stamps that no stream of tokens has, and if many answers came at once.
    """
    for number, request in enumerate(requests):
        _check(number, request)
    n_at_once = sum(request.came_at_once for request in requests)
    if n_at_once > AT_ONCE_SHARE * len(requests):
        raise ConfigError(
            f"the tokens of {n_at_once} of {len(requests)} answers came at once: something on the way to the "
            "engine holds streams back",
            param="last_s",
        )
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
    shares = np.array([np.nan if each.way_share is None else each.way_share for each in requests])
    likely = np.where(
        np.isnan(shares), np.minimum(way_s, WAY_SHARE * (first - sent)), shares * (first - sent)
    )
    arrival = np.where(np.isnan(queued), sent + likely, queued)
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
