"""The slowness of ranks in one kind of work: prompts, or decode steps.

A rank's slowness is the measured time of its last requests over their time at slowness 1: the least-squares
line through 0, in which long prompts have more weight, because other delays are the same for all, and older
requests less. It counts as far as it is known: a rank that the noise of its requests does not tell apart from
the median rank counts as equal to it, as does one without measurements.

A slow rank may have recovered, so requests try it again: for them it counts as the median rank does. A trial
costs the seconds that it takes longer than there, and trials cost a small share of all requests' seconds at
most. So short requests try a rank soon, and a long one only when many others were served since.
"""

from collections import deque
from math import hypot, inf, sqrt
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.kernel.fleet.columns import resized
from kvrouter.kernel.placement.kept_speeds import (
    JUDGED_MAX,
    SECONDS_MAX,
    KeptNoise,
    KeptPrompts,
    KeptTimes,
)

RECENT_REQUESTS = 16
"""The approximate number of a rank's last requests that count."""

PRIOR_REQUESTS = 4.0
"""The weight, in requests, of the median slowness in a rank's own, until it has enough requests."""

CLIP = 4.0
"""The largest factor between a request's measured and expected time that counts."""

TRIAL_SHARE = 0.01
"""The largest share of all requests' seconds that trials of slow ranks cost; each rank has an equal part."""

SLOW = 1.5
"""A rank becomes slow when its slowness is above this many times the median."""

RECOVERED = 1.25
"""A slow rank recovers when its slowness is at most this many times the median."""

ALIKE = 0.05
"""Ranks that differ from the median by at most this share count as equal, however sure that is."""

SURE_ERRORS = 3.0
"""So many standard errors a rank's slowness must be from the median to count, and three times as many after
one request: at light load the least difference decides, and a rank that is slow by chance alone would not be
asked again for minutes.
"""

NOISE_REQUESTS = 64
"""The approximate number of all ranks' last requests in the noise of one."""

SLOWNESS_MIN = 1e-3
SLOWNESS_MAX = 1e3

SETTLED_REQUESTS = 3
"""The least number of a rank's requests for its slowness to count among those of others, and for a slow rank
to recover.
"""

SLOW_REQUESTS = 10
"""A rank becomes slow only when so many of its last ``JUDGED_MAX`` requests each took longer than
``RECOVERED`` times the median: few of them say little, nor does a long one alone that weighs most.
"""

VERY_SLOW = 2.0
VERY_SLOW_REQUESTS = 5
"""So many requests in a row suffice that each took longer than ``VERY_SLOW`` times the median: such a rank
gets few.
"""


class Slowness:
    """The slowness of ranks in one kind of work: prompts, or decode steps."""

    def __init__(self) -> None:
        self.known: npt.NDArray[np.float64] = np.ones(16)
        """The current slowness, by slot."""
        self.column: npt.NDArray[np.float64] = np.ones(16)
        """The slowness that counts for the next request: the median's at a rank that it may try."""
        self._longest_s: npt.NDArray[np.float64] = np.zeros(16)
        """The seconds at slowness 1 of the longest request that may try a slow rank, by slot."""
        self.has_trials = False
        """Whether some rank may be tried, as of the last :meth:`refresh`."""
        self.total_s = 0.0
        """The seconds of all requests so far."""
        self.ranks: dict[Slot, RankTimes] = {}
        self.median = 1.0
        self._median_error = 0.0
        """The standard error of the median rank's slowness, over the noise of one request."""
        self._is_settled = False
        """Whether some rank has enough requests; until then each request changes the slowness of all."""
        self._weights, self._squares = 0.0, 0.0
        """The weights of the last requests, and the weighted sum of their squared noise, each known from the
        difference to the request before at the same rank: so a rank that becomes slow is no noise.
        """

    def rank_at(self, slot: Slot) -> "RankTimes":
        """Return the slot's measurements, new ones if there are none."""
        rank = self.ranks.get(slot)
        if rank is None:
            rank = self.ranks[slot] = RankTimes(self.total_s)
        return rank

    def kept_noise(self) -> KeptNoise:
        """Return the noise, to be kept over a restart."""
        return KeptNoise(self._weights, self._squares)

    def recall_noise(self, kept: KeptNoise) -> None:
        """Set the noise that was kept, unless some was measured since."""
        if not self._weights:
            self._weights, self._squares = kept.weights, kept.squares

    def begin_trial(self, slot: Slot, plain_s: float) -> float:
        """Reserve the seconds that a request is expected to cost as a trial of the slot's rank, until it is
        noted; return them, 0 where it is none.
        """
        longer_s = plain_s * (self.known.item(slot) - self.column.item(slot))
        if longer_s > 0.0:
            rank = self.ranks[slot]
            rank.trials_from_s += longer_s / self._trial_share
            self._update(slot, rank)
        return max(0.0, longer_s)

    def note(self, slot: Slot, plain_s: float, taken_s: float, now_s: float, *, trial_s: float = 0.0) -> None:
        """Add a request at the slot that took ``taken_s``, and would take ``plain_s`` at slowness 1.
        ``trial_s`` was reserved for it.
        """
        rank = self.ranks[slot]
        before_s, ratio, keep = rank.plain_s, rank.ratio, 1.0 - 1.0 / NOISE_REQUESTS
        rank.note(plain_s, taken_s, self.known.item(slot), now_s)
        self.total_s += plain_s * rank.ratio
        longer_s = plain_s * max(0.0, rank.ratio - self.median) - trial_s
        rank.trials_from_s = min(rank.trials_from_s + longer_s / self._trial_share, self.total_s)
        if rank.n_seen > 1:
            off, weight = (rank.ratio - ratio) / rank.own, (plain_s * before_s) ** 2
            self._weights = keep * self._weights + weight
            self._squares = keep * self._squares + weight * off * off / 2
        if not self._is_settled:
            self.refresh()
        self._update(slot, rank)

    def offer(self, plain_s: float) -> None:
        """Set the column for a request that takes ``plain_s`` at slowness 1."""
        if self.has_trials:
            np.copyto(self.column, self.known)
            np.copyto(self.column, self.median, where=self._longest_s >= plain_s)

    def refresh(self) -> None:
        """Update the columns."""
        known = [rank for rank in self.ranks.values() if rank.n_seen >= SETTLED_REQUESTS]
        self._is_settled = bool(known)
        # first requests show the error of the timing rather than of their rank
        known = known or [rank for rank in self.ranks.values() if rank.n_seen]
        if known:
            known.sort(key=attrgetter("own"))
            middle = known[(len(known) - 1) // 2]
            self.median, self._median_error = middle.own, middle.error
        self.known[:] = self.column[:] = self.median
        for slot, rank in self.ranks.items():
            self._update(slot, rank)
        self.has_trials = bool(self._longest_s.any())

    def _update(self, slot: Slot, rank: "RankTimes") -> None:
        """Set what the columns have for the slot."""
        self.known[slot] = self.column[slot] = slowness = self._current(rank)
        if slowness <= self.median:
            rank.trials_from_s, self._longest_s[slot] = self.total_s, 0.0
        else:
            may_cost_s = self._trial_share * (self.total_s - rank.trials_from_s)
            self._longest_s[slot] = may_cost_s / (slowness - self.median)

    @property
    def _trial_share(self) -> float:
        """The share of all requests' seconds that trials of one rank may cost."""
        return TRIAL_SHARE / len(self.ranks)

    def _current(self, rank: "RankTimes") -> float:
        """Return the rank's current slowness: the median's where the two cannot be told apart, which is sure
        of a rank that was judged slow.
        """
        if rank.n_seen == 0:
            return self.median
        if not rank.is_slow and abs(rank.own - self.median) <= self._doubt(rank):
            return self.median
        return rank.estimate(self.median)

    def _doubt(self, rank: "RankTimes") -> float:
        """Return the difference to the median up to which the rank's slowness may be chance."""
        return SURE_ERRORS * self._noise * hypot(rank.error, self._median_error)

    @property
    def _noise(self) -> float:
        """The standard deviation of a request's time, relative to its rank's; unknown before a second one."""
        return (self._squares / self._weights) ** 0.5 if self._weights else inf

    def freed(self, slot: Slot) -> "RankTimes | None":
        """Remove the slot's measurements, and return them."""
        if slot < len(self.column):
            self.known[slot] = self.column[slot] = self.median
            self._longest_s[slot] = 0.0
        return self.ranks.pop(slot, None)

    def resize(self, capacity: int) -> None:
        """Make room for more slots."""
        self.known = resized(self.known, capacity, self.median)
        self.column = resized(self.column, capacity, self.median)
        self._longest_s = resized(self._longest_s, capacity, 0.0)


class RankTimes:
    """The measurements of one rank's last requests, of one kind of work."""

    __slots__ = (
        "_n_predicted",
        "_plain",
        "_spread",
        "_taken",
        "clients",
        "error",
        "is_slow",
        "judged_s",
        "last_s",
        "n_seen",
        "n_very_slow",
        "own",
        "plain_s",
        "predicted_s",
        "ratio",
        "seen_s",
        "took_longer",
        "trials_from_s",
        "warm_s",
        "worker_rank",
    )

    def __init__(self, trials_from_s: float) -> None:
        self._plain = self._taken = self.last_s = 0.0
        self._spread = 0.0
        """The sum of its requests' squared weights in its slowness: for the standard error."""
        self.own = self.error = 1.0
        """The slowness of its own requests, within plausible limits, and its standard error over the noise of
        one request, more after few of them; as of its last request.
        """
        self.clients: deque[int] = deque(maxlen=RECENT_REQUESTS)
        """The clients of its last requests."""
        self.trials_from_s = trials_from_s
        """Its trials may cost their share of all requests' seconds from here on."""
        self._n_predicted = 0
        self.plain_s = self.ratio = 1.0
        """What its last request would take at slowness 1, and its time over that."""
        self.n_seen = 0
        self.predicted_s = self.seen_s = 0.0
        self.is_slow = False
        self.took_longer: deque[bool] = deque(maxlen=JUDGED_MAX)
        """Whether each of its last judged requests took longer than those of a rank that is not slow."""
        self.n_very_slow = 0
        """The number of the last judged requests in a row that took longer than those of a very slow rank."""
        self.judged_s = -inf
        """When the last of them was placed."""
        self.warm_s = inf
        """When the first answer arrived since its engine started; ``inf`` before that."""
        self.worker_rank: WorkerRank | None = None

    def forget(self) -> None:
        """Reset the measurements: the engine starts again."""
        self._plain = self._taken = self._spread = 0.0
        self.n_seen = 0
        self.took_longer.clear()
        self.n_very_slow = 0
        self.clients.clear()
        self.warm_s = inf

    def kept_times(self, total_s: float, now_s: float) -> KeptTimes | None:
        """Return its requests, to be kept over a restart; None without any. ``total_s``: of all requests."""
        if self.n_seen == 0:
            return None
        return KeptTimes(
            requests=self.n_seen,
            age_s=min(max(0.0, now_s - self.last_s), SECONDS_MAX),
            plain=self._plain,
            taken=self._taken,
            spread=self._spread,
            last_plain_s=self.plain_s,
            last_ratio=self.ratio,
            for_trials_s=min(max(0.0, total_s - self.trials_from_s), SECONDS_MAX),
        )

    def recall(self, kept: KeptTimes, total_s: float, now_s: float) -> None:
        """Set the requests that were kept at ``now_s``; ``total_s`` is that of all requests since."""
        self.n_seen, self.last_s = kept.requests, now_s - kept.age_s
        self._plain, self._taken, self._spread = kept.plain, kept.taken, kept.spread
        self._measure()
        self.plain_s, self.ratio = kept.last_plain_s, kept.last_ratio
        self.trials_from_s = total_s - kept.for_trials_s

    def kept_prompts(self, total_s: float, now_s: float) -> KeptPrompts:
        """Return all that is known of its first tokens, to be kept over a restart."""
        return KeptPrompts(
            times=self.kept_times(total_s, now_s),
            predictions=self._n_predicted,
            predicted_s=min(self.predicted_s, SECONDS_MAX),
            seen_s=min(self.seen_s, SECONDS_MAX),
            is_warm=self.warm_s < inf,
            is_slow=self.is_slow,
            took_longer=tuple(self.took_longer),
            very_slow=self.n_very_slow,
        )

    def recall_prompts(self, kept: KeptPrompts, total_s: float, now_s: float) -> None:
        """Set what was kept of its first tokens at ``now_s``."""
        if kept.times is not None:
            self.recall(kept.times, total_s, now_s)
        self._n_predicted, self.predicted_s, self.seen_s = kept.predictions, kept.predicted_s, kept.seen_s
        self.warm_s = -inf if kept.is_warm else inf
        self.is_slow, self.n_very_slow = kept.is_slow, kept.very_slow
        self.took_longer.extend(kept.took_longer)

    def judged(self, relative: float) -> None:
        """Judge a request that took ``relative`` times as long as at the median rank."""
        self.took_longer.append(relative > RECOVERED)
        self.n_very_slow = self.n_very_slow + 1 if relative > VERY_SLOW else 0

    @property
    def is_surely_slow(self) -> bool:
        """Whether most of its last requests were slow, so that its slowness is no noise."""
        return sum(self.took_longer) >= SLOW_REQUESTS or self.n_very_slow >= VERY_SLOW_REQUESTS

    def predicted(self, predicted_s: float, seen_s: float) -> None:
        """Add a predicted and a measured time to the means."""
        self._n_predicted += 1
        share = 1.0 / min(self._n_predicted, RECENT_REQUESTS)
        self.predicted_s += share * (predicted_s - self.predicted_s)
        self.seen_s += share * (seen_s - self.seen_s)

    def note(self, plain_s: float, taken_s: float, slowness: float, now_s: float) -> None:
        """Add a request that took ``taken_s``, and would take ``plain_s`` at slowness 1."""
        keep = 1.0 - 1.0 / RECENT_REQUESTS
        # the first requests may show that the timing is for another engine, which affects all ranks
        least_s = plain_s * slowness / CLIP if self.n_seen >= SETTLED_REQUESTS else 0.0
        bounded_s = min(max(taken_s, least_s), plain_s * slowness * CLIP)
        self._plain = keep * self._plain + plain_s * plain_s
        self._taken = keep * self._taken + plain_s * bounded_s
        self.plain_s, self.ratio = plain_s, bounded_s / plain_s
        self._spread = keep * keep * self._spread + plain_s**4
        self.last_s = now_s
        self.n_seen += 1
        self._measure()

    def _measure(self) -> None:
        self.own = min(max(self._taken / self._plain, SLOWNESS_MIN), SLOWNESS_MAX)
        self.error = self.own * sqrt(self._spread) / self._plain * (1.0 + 2.0 / self.n_seen)

    def estimate(self, median: float) -> float:
        """Return the likeliest current slowness, however sure it is; the rank needs at least one request."""
        prior_weight = (
            PRIOR_REQUESTS * max(0.0, 1.0 - self.n_seen / RECENT_REQUESTS) / min(self.n_seen, RECENT_REQUESTS)
        )
        own = (self.own + prior_weight * median) / (1.0 + prior_weight)
        return median if abs(own - median) <= ALIKE * median else own
