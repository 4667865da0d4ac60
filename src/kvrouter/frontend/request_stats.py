"""Request statistics: hit rates, times to the first token, tokens and errors of recent calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvrouter.api import fleet_schema as api

KEPT_MAX = 4096
"""The most ended calls that are kept, over all models."""

MINUTE_S = 60.0
WINDOW_S = 300.0
"""The windows of :class:`kvrouter.api.fleet_schema.RequestStats`."""

UNKNOWN = -1
NO_MODEL = ""
"""The model of calls without a served model; no statistics of its own."""

_CALL = np.dtype(
    [
        ("ended_s", np.float64),
        ("model", np.int32),
        ("is_error", np.bool_),
        ("ttft_s", np.float64),
        ("prompt_tokens", np.int64),
        ("completion_tokens", np.int64),
        ("predicted_tokens", np.int64),
        ("reported_tokens", np.int64),
    ]
)


class EndedCall(NamedTuple):
    """A call that ended. ``ttft_s`` is None without a first token; the cached tokens that the router
    predicted, and those that the engine reported, are None where they are unknown.
    """

    is_error: bool
    ttft_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    predicted_tokens: int | None = None
    reported_tokens: int | None = None


@dataclass(slots=True)
class _Hits:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        if cached_tokens is not None:
            self.requests += 1
            self.prompt_tokens += prompt_tokens
            self.cached_tokens += cached_tokens

    def reading(self) -> api.CacheHits:
        return api.CacheHits(
            requests=self.requests, prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens
        )


@dataclass(slots=True)
class _Totals:
    """The sums of one model's calls since the start."""

    requests: int = 0
    errors: int = 0
    first_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    predicted: _Hits = field(default_factory=_Hits)
    reported: _Hits = field(default_factory=_Hits)

    def add(self, call: EndedCall) -> None:
        self.requests += 1
        self.errors += call.is_error
        self.completion_tokens += call.completion_tokens
        if call.ttft_s is not None:
            self.first_tokens += 1
            self.prompt_tokens += call.prompt_tokens
            self.predicted.add(call.prompt_tokens, call.predicted_tokens)
            self.reported.add(call.prompt_tokens, call.reported_tokens)

    def reading(self, window_s: float) -> api.ServedRequests:
        return api.ServedRequests(
            window_s=round(window_s, 3),
            requests=self.requests,
            errors=self.errors,
            first_tokens=self.first_tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            predicted=self.predicted.reading(),
            reported=self.reported.reading(),
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
        self._calls = np.zeros(KEPT_MAX, _CALL)
        self._n = 0
        self._models: dict[str, int] = {}
        self._totals: dict[str, _Totals] = {}
        self._total = _Totals()

    def ended(self, model: str | None, call: EndedCall) -> None:
        """Add a call that ended; ``model`` is None without a served model."""
        name = model or NO_MODEL
        number = self._models.setdefault(name, len(self._models))
        self._calls[self._n % KEPT_MAX] = (
            self._clock(),
            number,
            call.is_error,
            np.nan if call.ttft_s is None else call.ttft_s,
            call.prompt_tokens,
            call.completion_tokens,
            UNKNOWN if call.predicted_tokens is None else call.predicted_tokens,
            UNKNOWN if call.reported_tokens is None else call.reported_tokens,
        )
        self._n += 1
        self._total.add(call)
        totals = self._totals.get(name)
        if totals is None:
            totals = self._totals[name] = _Totals()
        totals.add(call)

    def reading(self) -> StatsReading:
        """Return the statistics of this moment; takes as long as there are kept calls and models."""
        now_s = self._clock()
        began_s = self._began_s
        kept = self._calls[: min(self._n, KEPT_MAX)]
        if self._n > KEPT_MAX:
            began_s = float(kept["ended_s"].min())
        kept = kept[kept["ended_s"] > now_s - WINDOW_S]
        kept = kept[np.argsort(kept["model"], kind="stable")]
        ends = np.searchsorted(kept["model"], np.arange(len(self._models) + 1))
        age_s = now_s - self._began_s

        def stats(calls: np.ndarray, totals: _Totals) -> api.RequestStats:
            lately = calls[calls["ended_s"] > now_s - MINUTE_S]
            return api.RequestStats(
                last_minute=_served(lately, min(MINUTE_S, now_s - began_s)),
                last_5_minutes=_served(calls, min(WINDOW_S, now_s - began_s)),
                since_start=totals.reading(age_s),
            )

        by_model = {
            name: stats(kept[ends[number] : ends[number + 1]], self._totals[name])
            for name, number in self._models.items()
            if name != NO_MODEL
        }
        return StatsReading(stats(kept, self._total), by_model)


def _served(calls: np.ndarray, window_s: float) -> api.ServedRequests:
    answered = calls[~np.isnan(calls["ttft_s"])]
    p50_s, p99_s = _percentiles(answered["ttft_s"])
    return api.ServedRequests(
        window_s=round(window_s, 3),
        requests=len(calls),
        errors=int(calls["is_error"].sum()),
        first_tokens=len(answered),
        prompt_tokens=int(answered["prompt_tokens"].sum()),
        completion_tokens=int(calls["completion_tokens"].sum()),
        ttft_p50_s=p50_s,
        ttft_p99_s=p99_s,
        predicted=_hits(answered, "predicted_tokens"),
        reported=_hits(answered, "reported_tokens"),
    )


def _percentiles(ttft_s: np.ndarray) -> tuple[float | None, float | None]:
    """Return the 50th and the 99th percentile by nearest rank: each is a time that was measured."""
    if not len(ttft_s):
        return None, None
    p50_s, p99_s = np.quantile(ttft_s, (0.5, 0.99), method="inverted_cdf")
    return round(float(p50_s), 6), round(float(p99_s), 6)


def _hits(answered: np.ndarray, column: str) -> api.CacheHits:
    known = answered[answered[column] != UNKNOWN]
    return api.CacheHits(
        requests=len(known),
        prompt_tokens=int(known["prompt_tokens"].sum()),
        cached_tokens=int(known[column].sum()),
    )
