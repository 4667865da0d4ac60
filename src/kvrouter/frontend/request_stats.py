"""Request statistics: hit rates, times to the first token, tokens and errors of recent calls."""

import time
from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np

from kvrouter.api import fleet_schema as api

KEPT_MAX = 4096
"""The most ended calls that are kept, over all models."""

MINUTE_S = 60.0
WINDOW_S = 300.0
"""The windows of :class:`kvrouter.api.fleet_schema.RequestStats`."""

UNKNOWN = -1.0
NO_MODEL = ""
"""The model of calls without a served model; no statistics of its own."""

COLUMNS = 8
ENDED, MODEL, ERROR, TTFT, PROMPT, COMPLETION, PREDICTED, REPORTED = range(COLUMNS)
"""The columns of kept calls: seconds, a model's number, 0 or 1, seconds, and tokens; or :data:`UNKNOWN`."""


class EndedCall(msgspec.Struct, frozen=True, gc=False):
    """A call that ended. ``ttft_s`` is None without a first token; the cached tokens that the router
    predicted, and those that the engine reported, are None where they are unknown.
    """

    is_error: bool
    ttft_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    predicted_tokens: int | None = None
    reported_tokens: int | None = None


_ROW = Struct(f"{COLUMNS}d")


@dataclass(slots=True)
class _Totals:
    """The sums of one model's calls since the start; ``number`` is the model's."""

    number: int
    requests: int = 0
    errors: int = 0
    first_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    predicted_requests: int = 0
    predicted_prompt_tokens: int = 0
    predicted_tokens: int = 0
    reported_requests: int = 0
    reported_prompt_tokens: int = 0
    reported_tokens: int = 0

    def add(self, call: EndedCall) -> None:
        self.requests += 1
        self.errors += call.is_error
        self.completion_tokens += call.completion_tokens
        if call.ttft_s is None:
            return
        self.first_tokens += 1
        self.prompt_tokens += call.prompt_tokens
        if call.predicted_tokens is not None:
            self.predicted_requests += 1
            self.predicted_prompt_tokens += call.prompt_tokens
            self.predicted_tokens += call.predicted_tokens
        if call.reported_tokens is not None:
            self.reported_requests += 1
            self.reported_prompt_tokens += call.prompt_tokens
            self.reported_tokens += call.reported_tokens

    def reading(self, window_s: float) -> api.ServedRequests:
        return api.ServedRequests(
            window_s=round(window_s, 3),
            requests=self.requests,
            errors=self.errors,
            first_tokens=self.first_tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            predicted=api.CacheHits(
                requests=self.predicted_requests,
                prompt_tokens=self.predicted_prompt_tokens,
                cached_tokens=self.predicted_tokens,
            ),
            reported=api.CacheHits(
                requests=self.reported_requests,
                prompt_tokens=self.reported_prompt_tokens,
                cached_tokens=self.reported_tokens,
            ),
        )


class StatsReading(NamedTuple):
    """The statistics of all calls, and those of each model that was called."""

    all_models: api.RequestStats
    by_model: dict[str, api.RequestStats]


class RequestStatistics:
    """Keeps columns of the last :data:`KEPT_MAX` calls, and sums since the start. ``clock`` is monotonic, in
    seconds. Models are names of served models, so that their number is bounded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._cells = array("d", bytes(8 * COLUMNS * KEPT_MAX))
        self._n = 0
        self._totals: dict[str, _Totals] = {}

    def ended(self, model: str | None, call: EndedCall) -> None:
        """Add a call that ended; ``model`` is None without a served model."""
        name = model or NO_MODEL
        totals = self._totals.get(name)
        if totals is None:
            totals = self._totals[name] = _Totals(len(self._totals))
        totals.add(call)
        _ROW.pack_into(
            self._cells,
            self._n % KEPT_MAX * _ROW.size,
            self._clock(),
            totals.number,
            call.is_error,
            UNKNOWN if call.ttft_s is None else call.ttft_s,
            call.prompt_tokens,
            call.completion_tokens,
            UNKNOWN if call.predicted_tokens is None else call.predicted_tokens,
            UNKNOWN if call.reported_tokens is None else call.reported_tokens,
        )
        self._n += 1

    def reading(self) -> StatsReading:
        """Return the statistics of this moment; takes as long as there are kept calls and models."""
        now_s = self._clock()
        began_s = self._began_s
        kept = np.array(self._cells).reshape(-1, COLUMNS)[: min(self._n, KEPT_MAX)]
        if self._n > KEPT_MAX:
            began_s = float(kept[:, ENDED].min())
        kept = kept[kept[:, ENDED] > now_s - WINDOW_S]
        kept = kept[np.argsort(kept[:, MODEL], kind="stable")]
        ends = np.searchsorted(kept[:, MODEL], np.arange(len(self._totals) + 1)).tolist()
        minute_s, window_s = min(MINUTE_S, now_s - began_s), min(WINDOW_S, now_s - began_s)

        def stats(calls: np.ndarray, totals: _Totals) -> api.RequestStats:
            return api.RequestStats(
                last_minute=_served(calls[calls[:, ENDED] > now_s - MINUTE_S], minute_s),
                last_5_minutes=_served(calls, window_s),
                since_start=totals.reading(now_s - self._began_s),
            )

        by_model = {
            name: stats(kept[ends[totals.number] : ends[totals.number + 1]], totals)
            for name, totals in self._totals.items()
            if name != NO_MODEL
        }
        sums = zip(*(astuple(totals) for totals in self._totals.values()), strict=True)
        return StatsReading(stats(kept, _Totals(*map(sum, sums)) if self._totals else _Totals(0)), by_model)


def _served(calls: np.ndarray, window_s: float) -> api.ServedRequests:
    answered = calls[calls[:, TTFT] != UNKNOWN]
    p50_s, p99_s = _percentiles(answered[:, TTFT])
    return api.ServedRequests(
        window_s=round(window_s, 3),
        requests=len(calls),
        errors=int(calls[:, ERROR].sum()),
        first_tokens=len(answered),
        prompt_tokens=int(answered[:, PROMPT].sum()),
        completion_tokens=int(calls[:, COMPLETION].sum()),
        ttft_p50_s=p50_s,
        ttft_p99_s=p99_s,
        predicted=_hits(answered, PREDICTED),
        reported=_hits(answered, REPORTED),
    )


def _percentiles(ttft_s: np.ndarray) -> tuple[float | None, float | None]:
    """Return the 50th and the 99th percentile by nearest rank: each is a time that was measured."""
    n = len(ttft_s)
    if n == 0:
        return None, None
    ranked = np.sort(ttft_s)
    p50_s, p99_s = ranked[(n + 1) // 2 - 1], ranked[-(-99 * n // 100) - 1]
    return round(float(p50_s), 6), round(float(p99_s), 6)


def _hits(answered: np.ndarray, column: int) -> api.CacheHits:
    is_known = answered[:, column] != UNKNOWN
    return api.CacheHits(
        requests=int(is_known.sum()),
        prompt_tokens=int(answered[is_known, PROMPT].sum()),
        cached_tokens=int(answered[is_known, column].sum()),
    )
