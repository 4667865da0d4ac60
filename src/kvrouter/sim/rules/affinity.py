"""Rules that keep what belongs together at one worker while its load allows it."""

from collections import OrderedDict
from typing import ClassVar

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import FloatColumn, SlotColumn
from kvrouter.kernel.routing.interface import LegInput, PickInput
from kvrouter.sim.rules.rule import PublishedRule, Scores, cached_tokens

SESSIONS_MAX = 100_000
"""How many sessions are remembered; the one idle for longest is forgotten first."""


class LlmdScorers(PublishedRule):
    """The weighted sum of three scores, each 0..1: few requests waiting (scaled between the most and the
    fewest), KV memory that is free, and the share of the prompt that is cached. The highest wins.
    """

    source: ClassVar[str] = "llm-d's default profile: queue 2, KV-cache utilisation 2, prefix cache 3"

    def __init__(self, *, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> None:
        self._queue, self._kv, self._prefix = queue, kv, prefix

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Return the scores, negated."""
        waiting = self.gateway.waiting[allowed].astype(np.float64)
        spread = waiting.max() - waiting.min()
        queue: FloatColumn = np.ones(len(allowed))
        if spread > 0.0:
            queue = (waiting.max() - waiting) / spread
        score = self._queue * queue + self._kv * (1.0 - self.gateway.kv_use[allowed])
        if leg_input.leg is not Leg.DECODE:
            score += self._prefix * cached_tokens(leg_input, allowed) / max(1, leg_input.request.isl_tokens)
        return -score


class AibrixPrefix(PublishedRule):
    """The longest cached prefix, in whole percent of the prompt, among those with at most mean +
    ``deviations`` · standard deviation requests, and of equals the fewest requests; without any cached
    prefix, the fewest requests.

    If load is uneven, only the workers with the fewest requests are candidates: if the most is at least
    ``imbalance`` above the fewest and, of three workers or more, over ``factor`` · (mean of the others + 1).
    This is ``load_balance.go`` and ``prefix_cache.go`` of vllm-project/aibrix in 2026, with these defaults.
    Up to 0.7 the difference alone counted, and the Helm chart set it to 16 and the deviations to 2.
    """

    source: ClassVar[str] = (
        "AIBrix's prefix-cache router behind its load gate: difference 8, factor 2, 1 standard deviation"
    )

    def __init__(self, *, imbalance: float = 8.0, factor: float = 2.0, deviations: float = 1.0) -> None:
        self._imbalance, self._factor, self._deviations = imbalance, factor, deviations

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Return the requests of the best matches that are not overloaded, and infinity for others."""
        running: FloatColumn = self.gateway.in_flight[allowed].astype(np.float64)
        limit = running.mean() + self._deviations * running.std()
        cached = cached_tokens(leg_input, allowed)
        matches = (cached > 0.0) & (running <= limit)
        if self._is_uneven(running):
            fewest = running == running.min()
            matches = (cached > 0.0) & fewest
        if not matches.any():
            return running
        percent = np.floor(100.0 * cached / max(1, leg_input.request.isl_tokens))
        longest = percent[matches].max()
        return np.where(matches & (percent == longest), running, np.inf)

    def _is_uneven(self, running: FloatColumn) -> bool:
        most, n = float(running.max()), len(running)
        if n < 2 or most - running.min() < self._imbalance:
            return False
        return n == 2 or most > self._factor * ((float(running.sum()) - most) / (n - 1) + 1.0)


class SglangCacheAware(PublishedRule):
    """Where the most requests at a worker are more than ``balance_abs`` above the fewest and over
    ``balance_rel`` times as many, the worker with the fewest. Else the longest cached prefix, where that is
    more than the share ``cache`` of the prompt; below that the fewest requests, in place of the smallest
    tree: the router's index knows what engines hold.
    """

    source: ClassVar[str] = "sglang-router's cache_aware: cache 0.3, balance 64 and 1.5"

    def __init__(self, *, cache: float = 0.3, balance_abs: float = 64.0, balance_rel: float = 1.5) -> None:
        self._cache, self._balance_abs, self._balance_rel = cache, balance_abs, balance_rel

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Return the requests of the best matches while load is balanced; else of all."""
        in_flight = self.gateway.in_flight[allowed]
        most, fewest = int(in_flight.max()), int(in_flight.min())
        if most - fewest > self._balance_abs and most > self._balance_rel * fewest:
            return in_flight
        cached = cached_tokens(leg_input, allowed)
        if cached.max() > self._cache * leg_input.request.isl_tokens:
            return np.where(cached == cached.max(), in_flight, np.inf)
        return in_flight


class StickySessions(PublishedRule):
    """A session stays at its worker, unless that has over ``escape`` times the average number of requests and
    over ``floor`` of them: then it moves to the one with the fewest. So does what belongs to no session.

    The escape is that of a study of coding agents, agentic-kvc by G. Wang, May 2026, which counted tokens in
    flight first and requests later. It has no floor: in an idle fleet one request is over twice the average.
    """

    source: ClassVar[str] = (
        "session affinity of gateways; escape at over 2 × the mean, as in agentic-kvc (coding agents)"
    )

    def __init__(self, *, escape: float = 2.0, floor: float = 0.0) -> None:
        self._escape, self._floor = escape, floor
        self._at: OrderedDict[tuple[Leg, str], Slot] = OrderedDict()

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:  # noqa: ARG002 - the port's signature
        """Count the requests."""
        return self.gateway.in_flight[allowed]

    def pick(self, cost: FloatColumn, pick_input: PickInput) -> Slot:
        """Take the session's worker, or find it another one."""
        allowed, session = pick_input.allowed, self.gateway.session_of(pick_input.request.request_id)
        key = (pick_input.leg, session)
        slot = self._at.get(key) if session else None
        if slot is not None and (allowed == slot).any():
            limit = max(self._floor, self._escape * float(cost[allowed].mean()))
            if cost[slot] <= limit:
                self._at.move_to_end(key)
                return slot
        chosen = super().pick(cost, pick_input)
        if session:
            self._at[key] = chosen
            self._at.move_to_end(key)
            if len(self._at) > SESSIONS_MAX:
                self._at.popitem(last=False)
        return chosen
