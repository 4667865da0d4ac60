"""Learned speeds of worker ranks, from the times of requests to the first token and between tokens.

A rank's slowness is the measured time of its last requests over their time at slowness 1: the least-squares
line through 0, in which long prompts have more weight, because other delays are the same for all, and older
requests less. It counts as far as it is known: a rank that the noise of its requests does not tell apart from
the median rank counts as equal to it, as does one without measurements. The difference of a rank without
requests decays by half-lives, so that it is tried again. Requests that waited for KV memory or a seat are not
measured. Nor are slow requests that were placed before the first answer of an engine since its start: it is
cold, and a rank that counted as slow for that would get no requests for minutes while others are not busy.
"""

from collections import deque
from math import ceil, hypot, inf, log, sqrt
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.kernel.fleet.columns import resized
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.interference import Interference
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.routing.costs.time import ANSWER_S
from kvrouter.kernel.routing.interface import Pick, Speeds

RECENT_REQUESTS = 16
"""The approximate number of a rank's last requests that count."""

PRIOR_REQUESTS = 4.0
"""The weight, in requests, of the median slowness in a rank's own, until it has enough requests."""

CLIP = 4.0
"""The largest factor between a request's measured and expected time that counts."""

FORGET_S = 120.0
"""The half-life of a rank's difference to the others without a request."""

FORGET_MAX_S = 3600.0
"""The longest half-life: it doubles each time that a rank which was half forgotten is found as it was, since
each such request is slow, and a rank that never changes need not be tried every few minutes.
"""

TURNOVER_S = 100.0
"""The half-life of inserted tokens in a cache's turnover."""

TURNOVER_FLOOR = 0.25
"""A cache with fewer insertions than this share of the mean is calm: its turnover is 0."""

TURNOVER_ALIKE = 0.15
"""Turnovers this near to the mean count as equal to it, and others as nearer to it by as much: otherwise
small differences would decide between idle ranks, and shift requests for minutes after one request.
"""

ANSWERS = 64
"""The approximate number of last answers in the mean time that an answer holds its blocks."""

ANSWER_TOKENS_MIN = 4
"""Shorter answers do not show how fast a rank decodes."""

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

JUDGED_REQUESTS = 12
SLOW_REQUESTS = 10
"""A rank becomes slow only when so many of its last ``JUDGED_REQUESTS`` requests each took longer than
``RECOVERED`` times the median: few of them say little, nor does a long one alone that weighs most.
"""

VERY_SLOW = 2.0
VERY_SLOW_REQUESTS = 5
"""So many requests in a row suffice that each took longer than ``VERY_SLOW`` times the median: such a rank
gets few.
"""

JUDGED_EVERY_S = 1.0
"""Of requests that were placed within this time one is judged: a pause of an engine delays all that are
there, once.
"""

CLIENT_SHARE = 0.5
"""The largest share of one client in a rank's last requests, or the client's share in all ranks' last
requests if that is larger: a client's requests may be slow for other reasons than the rank.
"""

CLIENTS_SEEN = 64
"""The number of all ranks' last requests from which a client's share is computed."""

CLIENT_WAITS_S = 10.0
"""After this long without a measured request, a rank is measured by any client's requests."""

_REFRESH_S = 1.0
_REBASE = 60.0


class Expected(msgspec.Struct, frozen=True, gc=False):
    """The prediction for one leg at a slot, when it was placed."""

    slot: Slot
    rank: WorkerRank
    at_s: float
    plain_s: float
    """The seconds of the queue and this prompt, on a rank of slowness 1."""
    steps_s: float
    """The seconds of others' decode steps in that time."""
    predicted_s: float
    is_clear: bool
    """Whether the duration depends on the rank's speed alone."""


class SpeedReading(NamedTuple):
    """The measured speed of one rank."""

    slowness: float
    """The slowness of its prompts, relative to the settings' timing."""
    decode_slowness: float
    """The slowness of its decode steps."""
    relative: float
    """The slowness of its prompts, relative to the median rank."""
    requests: int
    """The number of its measured requests."""
    predicted_s: float
    """The mean predicted time of its last requests to the first token."""
    seen_s: float
    """The mean measured time of its last requests to the first token."""
    is_slow: bool


class LearnedSpeeds:
    """The learned speeds of one model's ranks. ``now_s`` is seconds of one monotonic clock."""

    def __init__(self, fleet: Fleet, events: PlacementEvents) -> None:
        self._fleet = fleet
        self.events = events
        self._prompts, self._steps = _Slowness(), _Slowness()
        self._turnover: npt.NDArray[np.float64] = np.zeros(16)
        self._inserted: npt.NDArray[np.float64] = np.zeros(16)
        """The tokens inserted into each cache, each weighed 2^((its time − ``_base_s``) / TURNOVER_S)."""
        self._shown = self._prompts.column[:0], self._steps.column[:0], self._turnover[:0]
        """Their first entries, as they were last returned: of slowness, decode slowness and turnover."""
        self._base_s, self._refreshed_s = 0.0, -inf
        self._mean_inserted: dict[bool, float] = {}
        """The mean inserted tokens, by role: of ranks that only prefill (True), and of the others."""
        self._answer_s = ANSWER_S
        self._answers = 0
        self._clients: deque[int] = deque(maxlen=CLIENTS_SEEN)
        self._interference = Interference()

    def speeds(self, n_slots: int, *, now_s: float) -> Speeds:
        """Return the current speeds; the next call reuses the columns."""
        self._ensure_slots(n_slots)
        if now_s - self._refreshed_s >= _REFRESH_S:
            self._refresh(now_s)
        if len(self._shown[0]) != n_slots:
            self._show(n_slots)
        return Speeds(*self._shown, self._answer_s, self._interference.share)

    def decode_slowness(self, slot: Slot) -> float:
        """Return the duration of a decode step at the slot, relative to the settings' timing."""
        return self._steps.column.item(slot) if slot < len(self._steps.column) else self._steps.median

    def placed(self, pick: Pick, tokens: int, *, steps_s: float, now_s: float) -> Expected | None:
        """Record a placed leg: ``tokens`` of its prompt are inserted into the rank's cache, and others'
        decode steps are ``steps_s`` of its queue. Return the prediction; None when times are not predicted.
        """
        times = pick.times
        slot = pick.slot
        self._ensure_slots(slot + 1)
        self._insert(slot, tokens, now_s)
        if times is None:
            return None
        own_s = times.queue_s + times.prefill_s
        waits_s = self._interference.share * steps_s
        plain_s = max(0.0, own_s - waits_s) / self._prompts.column.item(slot)
        # If decode steps are most of the wait, it shows little of how fast prompts are computed.
        is_clear = times.memory_s == 0.0 and times.prefill_s > 0.0 and waits_s <= own_s / 2
        expected_s = own_s + times.memory_s + times.transfer_s  # Times.expected_s, on a path of few files
        return Expected(slot, pick.rank, now_s, plain_s, steps_s, expected_s, is_clear)

    def observed(self, expected: Expected, *, client: int = 0, now_s: float) -> None:
        """Record the first token or the end of a prefill leg of a prediction; ``client`` sent the request."""
        slot, seen_s = expected.slot, now_s - expected.at_s
        if self._fleet.rank_at(slot) != expected.rank:
            return
        self.events.first_token_observed(expected.rank, predicted_s=expected.predicted_s, seen_s=seen_s)
        rank = self._prompts.rank_at(slot)
        rank.worker_rank = expected.rank
        rank.predicted(expected.predicted_s, seen_s)
        was_cold = expected.at_s < rank.warm_s
        rank.warm_s = min(rank.warm_s, now_s)
        if was_cold and seen_s > SLOW * expected.predicted_s:
            return
        if not expected.is_clear or expected.plain_s <= 0.0 or not self._counts(rank, client, now_s):
            return
        plain_s, steps_s = expected.plain_s, expected.steps_s
        self._interference.note(slot, plain_s=plain_s, steps_s=steps_s, seen_s=seen_s)
        waited_s = self._interference.share * steps_s
        taken_s = max(seen_s - waited_s, seen_s / 10)
        self._prompts.note(slot, plain_s, taken_s, now_s)
        if expected.at_s - rank.judged_s >= JUDGED_EVERY_S:
            rank.judged_s = expected.at_s
            rank.judged(taken_s / (self._prompts.median * plain_s))
        self._judge(rank, expected.rank, rank.estimate(self._prompts.median, now_s))

    def _counts(self, rank: "_Rank", client: int, now_s: float) -> bool:
        """Whether a further request of the client is measured at the rank; if so, count it."""
        self._clients.append(client)
        share = max(CLIENT_SHARE, self._clients.count(client) / len(self._clients))
        most = ceil(RECENT_REQUESTS * share)
        is_overdue = now_s - rank.last_s >= CLIENT_WAITS_S
        if most < RECENT_REQUESTS and not is_overdue and rank.clients.count(client) >= most:
            return False
        rank.clients.append(client)
        return True

    def answered(
        self, slot: Slot, tokens: int, seconds: float, *, step_s: float, client: int = 0, now_s: float
    ) -> None:
        """Record an answer: ``seconds`` from first to last token; a step at slowness 1 takes ``step_s``."""
        self._ensure_slots(slot + 1)
        self._answers += 1
        share = 1.0 / min(self._answers, ANSWERS)
        self._answer_s += share * (seconds / self._steps.column.item(slot) - self._answer_s)
        if tokens < ANSWER_TOKENS_MIN or step_s <= 0.0:
            return
        if self._counts(self._steps.rank_at(slot), client, now_s):
            self._steps.note(slot, step_s, seconds / (tokens - 1), now_s)

    def fleet_changed(self) -> None:
        """Drop the measurements of ranks whose engines do not answer: they will start again, cold."""
        columns = self._fleet.columns
        silent = np.flatnonzero(columns.present & (columns.engine_silent | ~columns.alive)).tolist()
        found = [kind.ranks.get(Slot(slot)) for slot in silent for kind in (self._prompts, self._steps)]
        known = [rank for rank in found if rank is not None and (rank.n_seen or rank.warm_s < inf)]
        for rank in known:
            rank.forget()
        if known:
            self._prompts.refresh(self._refreshed_s)
            self._steps.refresh(self._refreshed_s)

    def freed(self, slot: Slot) -> None:
        """Remove the slot's rank."""
        rank = self._prompts.freed(slot)
        if rank is not None and rank.worker_rank is not None:
            self.events.rank_gone(rank.worker_rank)
        self._steps.freed(slot)
        self._interference.freed(slot)
        if slot < len(self._inserted):
            self._inserted[slot] = self._turnover[slot] = 0.0

    def reading(self, slot: Slot) -> SpeedReading | None:
        """Return the measured speed of the slot's rank; None before its first request."""
        rank = self._prompts.ranks.get(slot)
        if rank is None:
            return None
        slowness = self._prompts.column.item(slot)
        return SpeedReading(
            slowness=slowness,
            decode_slowness=self._steps.column.item(slot),
            relative=slowness / self._prompts.median,
            requests=rank.n_seen,
            predicted_s=rank.predicted_s,
            seen_s=rank.seen_s,
            is_slow=rank.is_slow,
        )

    def _ensure_slots(self, n_slots: int) -> None:
        if n_slots > len(self._turnover):
            capacity = max(n_slots, 2 * len(self._turnover))
            self._prompts.resize(capacity)
            self._steps.resize(capacity)
            self._turnover = resized(self._turnover, capacity, 0.0)
            self._inserted = resized(self._inserted, capacity, 0.0)
            self._show(len(self._shown[0]))

    def _show(self, n_slots: int) -> None:
        self._shown = self._prompts.column[:n_slots], self._steps.column[:n_slots], self._turnover[:n_slots]

    def _judge(self, rank: "_Rank", worker_rank: WorkerRank, slowness: float) -> None:
        if rank.n_seen < SETTLED_REQUESTS or len(self._prompts.ranks) < 2:
            return
        relative = slowness / self._prompts.median
        is_slow = relative > RECOVERED
        if not rank.is_slow:
            is_slow = relative > SLOW and rank.is_surely_slow
        if is_slow != rank.is_slow:
            rank.is_slow = is_slow
            self.events.rank_speed_changed(worker_rank, is_slow=is_slow, slowness=relative)

    def _insert(self, slot: Slot, tokens: int, now_s: float) -> None:
        inserted = self._inserted.item(slot) + tokens * 2.0 ** ((now_s - self._base_s) / TURNOVER_S)
        self._inserted[slot] = inserted
        mean = self._mean_inserted.get(self._fleet.columns.prefill.item(slot), 0.0)
        if mean > 0.0:
            self._turnover[slot] = _turnover(inserted / mean)

    def _refresh(self, now_s: float) -> None:
        """Decay old measurements, and update the columns."""
        if self._refreshed_s == -inf:
            self._base_s = now_s
        if (now_s - self._base_s) / TURNOVER_S > _REBASE:
            self._inserted *= 2.0 ** -((now_s - self._base_s) / TURNOVER_S)
            self._base_s = now_s
        self._refreshed_s = now_s
        columns = self._fleet.columns
        n_slots = len(columns.present)
        for prefills in (True, False):
            alike = columns.present & (columns.prefill == prefills)
            inserted = self._inserted[:n_slots][alike]
            mean = self._mean_inserted[prefills] = float(inserted.mean()) if len(inserted) else 0.0
            if mean > 0.0:
                self._turnover[:n_slots][alike] = [_turnover(ratio) for ratio in (inserted / mean).tolist()]
        self._interference.refresh()
        self._prompts.refresh(now_s)
        self._steps.refresh(now_s)


def _turnover(ratio: float) -> float:
    """Return the turnover of a cache with ``ratio`` times the mean insertions."""
    lead = log(max(ratio, TURNOVER_FLOOR / 2))
    near = min(max(lead, -TURNOVER_ALIKE), TURNOVER_ALIKE)
    return max(lead - near - log(TURNOVER_FLOOR), 0.0)


class _Slowness:
    """The slowness of ranks in one kind of work: prompts, or decode steps."""

    def __init__(self) -> None:
        self.column: npt.NDArray[np.float64] = np.ones(16)
        """The current slowness, by slot."""
        self.ranks: dict[Slot, _Rank] = {}
        self.median = 1.0
        self._median_error = 0.0
        """The standard error of the median rank's slowness, over the noise of one request."""
        self._is_settled = False
        """Whether some rank has enough requests; until then each request changes the slowness of all."""
        self._weights, self._squares = 0.0, 0.0
        """The weights of the last requests, and the weighted sum of their squared noise, each known from the
        difference to the request before at the same rank: so a rank that becomes slow is no noise.
        """

    def rank_at(self, slot: Slot) -> "_Rank":
        """Return the slot's measurements, new ones if there are none."""
        rank = self.ranks.get(slot)
        if rank is None:
            rank = self.ranks[slot] = _Rank()
        return rank

    def note(self, slot: Slot, plain_s: float, taken_s: float, now_s: float) -> None:
        """Add a request at the slot that took ``taken_s``, and would take ``plain_s`` at slowness 1."""
        rank = self.ranks[slot]
        before_s, ratio, keep = rank.plain_s, rank.ratio, 1.0 - 1.0 / NOISE_REQUESTS
        if rank.n_seen and now_s - rank.last_s >= rank.forget_s:
            lead = rank.own() - self.median
            is_confirmed = abs(lead) > self._doubt(rank) and 2.0 * (taken_s / plain_s - self.median) / lead > 1.0
            rank.forget_s = min(2.0 * rank.forget_s, FORGET_MAX_S) if is_confirmed else FORGET_S
        rank.note(plain_s, taken_s, self.column.item(slot), now_s)
        if rank.n_seen > 1:
            off, weight = (rank.ratio - ratio) / rank.own(), (plain_s * before_s) ** 2
            self._weights = keep * self._weights + weight
            self._squares = keep * self._squares + weight * off * off / 2
        if not self._is_settled:
            self.refresh(now_s)
        self.column[slot] = self._current(rank, now_s)

    def refresh(self, now_s: float) -> None:
        """Decay old measurements, and update the column."""
        known = [rank for rank in self.ranks.values() if rank.n_seen >= SETTLED_REQUESTS]
        self._is_settled = bool(known)
        # first requests show the error of the timing rather than of their rank
        known = known or [rank for rank in self.ranks.values() if rank.n_seen]
        if known:
            known.sort(key=_Rank.own)
            middle = known[(len(known) - 1) // 2]
            self.median, self._median_error = middle.own(), middle.error()
        self.column[:] = self.median
        for slot, rank in self.ranks.items():
            self.column[slot] = self._current(rank, now_s)

    def _current(self, rank: "_Rank", now_s: float) -> float:
        """Return the rank's current slowness: the median's where the two cannot be told apart, which is sure
        of a rank that was judged slow.
        """
        if rank.n_seen == 0:
            return self.median
        if not rank.is_slow and abs(rank.own() - self.median) * rank.kept(now_s) <= self._doubt(rank):
            return self.median
        return rank.estimate(self.median, now_s)

    def _doubt(self, rank: "_Rank") -> float:
        """Return the difference to the median up to which the rank's slowness may be chance."""
        return SURE_ERRORS * self._noise * hypot(rank.error(), self._median_error)

    @property
    def _noise(self) -> float:
        """The standard deviation of a request's time, relative to its rank's; unknown before a second one."""
        return (self._squares / self._weights) ** 0.5 if self._weights else inf

    def freed(self, slot: Slot) -> "_Rank | None":
        """Remove the slot's measurements, and return them."""
        if slot < len(self.column):
            self.column[slot] = self.median
        return self.ranks.pop(slot, None)

    def resize(self, capacity: int) -> None:
        """Make room for more slots."""
        self.column = resized(self.column, capacity, self.median)


class _Rank:
    """The measurements of one rank's last requests."""

    __slots__ = (
        "_n_predicted",
        "_plain",
        "_spread",
        "_taken",
        "clients",
        "forget_s",
        "is_slow",
        "judged_s",
        "last_s",
        "n_seen",
        "n_very_slow",
        "plain_s",
        "predicted_s",
        "ratio",
        "seen_s",
        "took_longer",
        "warm_s",
        "worker_rank",
    )

    def __init__(self) -> None:
        self._plain = self._taken = self.last_s = 0.0
        self._spread = 0.0
        """The sum of its requests' squared weights in its slowness: for the standard error."""
        self.clients: deque[int] = deque(maxlen=RECENT_REQUESTS)
        """The clients of its last requests."""
        self.forget_s = FORGET_S
        """The half-life of its difference to the median."""
        self._n_predicted = 0
        self.plain_s = self.ratio = 1.0
        """What its last request would take at slowness 1, and its time over that."""
        self.n_seen = 0
        self.predicted_s = self.seen_s = 0.0
        self.is_slow = False
        self.took_longer: deque[bool] = deque(maxlen=JUDGED_REQUESTS)
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
        self.forget_s = FORGET_S
        self.took_longer.clear()
        self.n_very_slow = 0
        self.clients.clear()
        self.warm_s = inf

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

    def own(self) -> float:
        """Return the slowness of its own requests, within plausible limits; it needs at least one."""
        return min(max(self._taken / self._plain, SLOWNESS_MIN), SLOWNESS_MAX)

    def error(self) -> float:
        """Return the standard error of its slowness over the noise of one request; more after few of them."""
        return self.own() * sqrt(self._spread) / self._plain * (1.0 + 2.0 / self.n_seen)

    def estimate(self, median: float, now_s: float) -> float:
        """Return the likeliest current slowness, however sure it is; the rank needs at least one request."""
        prior_weight = (
            PRIOR_REQUESTS * max(0.0, 1.0 - self.n_seen / RECENT_REQUESTS) / min(self.n_seen, RECENT_REQUESTS)
        )
        own = (self.own() + prior_weight * median) / (1.0 + prior_weight)
        lead = (own - median) * self.kept(now_s)
        return median if abs(lead) <= ALIKE * median else median + lead

    def kept(self, now_s: float) -> float:
        """Return how much of the difference to the median still counts."""
        kept: float = 2.0 ** -(max(0.0, now_s - self.last_s) / self.forget_s)
        return kept
