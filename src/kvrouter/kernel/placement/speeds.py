"""How fast each worker rank is, learned from what its requests took to their first token and between tokens.

A rank's slowness is what its last requests took, over what they would have taken one of slowness 1: the least
squares of a line through 0, in which long prompts weigh most, as what else delays a request is the same for
all, and old ones less. A rank without evidence is as slow as
ranks are on average; one that was not heard of for long becomes so again by halves, so that it is tried
again.
Requests that had to wait for KV memory or a seat say nothing of its speed. Nor do those that were placed
before the first answer of an engine since it started, where they take long: it is cold. A rank that counted
as slow for it would get nothing for minutes where the others are not busy.
"""

from collections import deque
from collections.abc import Mapping
from math import ceil, inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.kernel.fleet.columns import resized
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.events import PlacementEvents
from kvrouter.kernel.placement.interference import Interference
from kvrouter.kernel.routing.costs.time import ANSWER_S
from kvrouter.kernel.routing.request import Pick, Speeds

MEMORY = 16
"""About how many of a rank's last requests count."""

CAUTION = 4.0
"""As many requests' worth it is taken for as slow as the others, until so many of its own were seen."""

CLIP = 4.0
"""One request changes the view of a rank as if it had taken at most so many times what was expected."""

FORGET_S = 120.0
"""After so long without a request half of what sets a rank apart is forgotten."""

TURNOVER_S = 100.0
"""What was cached so long ago counts half, in how fast a cache is replaced."""

TURNOVER_FLOOR = 0.25
"""A cache into which less came than this share of the others' mean is calm: its turnover is 0."""

TURNOVER_ALIKE = 0.15
"""Caches count as alike whose turnover is this near to the mean's, and others as so much nearer to it: else
any difference decides between idle ranks, and who came to one moves the others for minutes after it left.
"""

ANSWERS = 64
"""About how many of the last answers count in how long one keeps its blocks."""

ANSWER_TOKENS_MIN = 4
"""Shorter answers say nothing of how fast a rank decodes."""

SLOW = 1.5
"""A rank that takes so many times as long as half of the ranks do is slow,"""

WELL = 1.25
"""and at this or below it is well again."""

ALIKE = 0.05
"""Ranks that differ by no more from the others count as alike: what is left to tell them apart is chance."""

SLOWNESS_MIN = 1e-3
SLOWNESS_MAX = 1e3

SLOW_REQUESTS = 3
"""So many of its own requests must say so."""

CLIENT_SHARE = 0.5
"""Of a rank's last requests so many may be one client's, or as many as are its of all ranks' last requests:
what it asks for may be slow for reasons of its own.
"""

CLIENTS_SEEN = 64
"""So many of all ranks' last requests say what share a client has."""

CLIENT_WAITS_S = 10.0
"""A rank from which nobody else was answered for so long may be shown by one client's requests again."""

_REFRESH_S = 1.0
_REBASE = 60.0


class Expected(NamedTuple):
    """What one leg was expected to take at a slot when it was placed."""

    slot: Slot
    rank: WorkerRank
    at_s: float
    plain_s: float
    """What is queued and this prompt, on a rank of slowness 1."""
    steps_s: float
    """What the decode steps of others take meanwhile."""
    predicted_s: float
    is_clear: bool
    """Whether nothing but the rank's speed decides how long it takes."""


class SpeedReading(NamedTuple):
    """What is known of one rank's speed."""

    slowness: float
    """Of its prompts, over the settings' timing."""
    decode_slowness: float
    """Of its decode steps."""
    relative: float
    """Over the slowness that half of the ranks are within."""
    requests: int
    """How many of its requests showed it."""
    predicted_s: float
    """The mean prediction of its last requests to the first token,"""
    seen_s: float
    """and what they took."""
    is_slow: bool


class LearnedSpeeds:
    """The speeds of one model's ranks. ``now_s`` is a moment of one monotonic clock."""

    def __init__(self, fleet: Fleet, events: PlacementEvents) -> None:
        self._fleet = fleet
        self.events = events
        self._slowness: npt.NDArray[np.float64] = np.ones(16)
        self._decode_slowness: npt.NDArray[np.float64] = np.ones(16)
        self._turnover: npt.NDArray[np.float64] = np.zeros(16)
        self._inserted: npt.NDArray[np.float64] = np.zeros(16)
        """Tokens that came into each cache, each counted 2^(its age before ``_base_s`` / TURNOVER_S)."""
        self._ranks: dict[Slot, _Rank] = {}
        self._decoding: dict[Slot, _Rank] = {}
        self._base_s, self._refreshed_s = 0.0, -inf
        self._is_settled = self._decode_is_settled = False
        """Whether some rank was seen often enough; until then each request changes what all count as."""
        self._mean = self._median = self._decode_mean = 1.0
        self._mean_inserted: dict[bool, float] = {}
        """By role: what came into the caches of those who only prefill, and of the others."""
        self._answer_s = ANSWER_S
        self._answers = 0
        self._clients: deque[int] = deque(maxlen=CLIENTS_SEEN)
        self._interference = Interference()

    def speeds(self, n_slots: int, *, now_s: float) -> Speeds:
        """What is known now; the columns are those of the next reading too."""
        self._ensure_slots(n_slots)
        if now_s - self._refreshed_s >= _REFRESH_S:
            self._refresh(now_s)
        return Speeds(
            self._slowness[:n_slots],
            self._decode_slowness[:n_slots],
            self._turnover[:n_slots],
            self._answer_s,
            self._interference.share,
        )

    def decode_slowness(self, slot: Slot) -> float:
        """How many times as long as the settings' timing says a decode step takes there."""
        return float(self._decode_slowness[slot]) if slot < len(self._decode_slowness) else self._decode_mean

    def placed(self, pick: Pick, tokens: int, *, steps_s: float, now_s: float) -> Expected | None:
        """A leg was placed, ``tokens`` of its prompt come into that rank's cache, and of its queue the decode
        steps of others take ``steps_s``.
        """
        times = pick.times
        slot = pick.slot
        self._ensure_slots(slot + 1)
        self._insert(slot, tokens, now_s)
        if times is None:
            return None
        own_s = times.queue_s + times.prefill_s
        waits_s = self._interference.share * steps_s
        plain_s = max(0.0, own_s - waits_s) / float(self._slowness[slot])
        # Where decode steps are most of the wait it says little of how fast prompts are computed.
        is_clear = times.memory_s == 0.0 and times.prefill_s > 0.0 and waits_s <= own_s / 2
        expected_s = own_s + times.memory_s + times.transfer_s  # Times.expected_s, on a path of few files
        return Expected(slot, pick.rank, now_s, plain_s, steps_s, expected_s, is_clear)

    def came(self, expected: Expected, *, client: int = 0, now_s: float) -> None:
        """What was expected came: the first token, or the end of a prefill leg; ``client`` asked for it."""
        slot, seen_s = expected.slot, now_s - expected.at_s
        if self._fleet.rank_at(slot) != expected.rank:
            return
        self.events.came(expected.rank, predicted_s=expected.predicted_s, seen_s=seen_s)
        rank = self._ranks.get(slot)
        if rank is None:
            rank = self._ranks[slot] = _Rank()
            rank.who = expected.rank
        rank.predicted(expected.predicted_s, seen_s)
        was_cold = expected.at_s < rank.warm_s
        rank.warm_s = min(rank.warm_s, now_s)
        if was_cold and seen_s > SLOW * expected.predicted_s:
            return
        if not expected.is_clear or expected.plain_s <= 0.0 or not self._counts(rank, client, now_s):
            return
        before = float(self._slowness[slot])
        plain_s, steps_s = expected.plain_s, expected.steps_s
        self._interference.note(slot, plain_s=plain_s, steps_s=steps_s, seen_s=seen_s)
        waited_s = self._interference.share * steps_s
        rank.note(plain_s, max(seen_s - waited_s, seen_s / 10), before, now_s)
        if not self._is_settled:
            self._refresh_slowness(now_s)
        self._slowness[slot] = rank.slowness(self._mean, now_s)
        self._judge(rank, expected.rank, float(self._slowness[slot]))

    def _counts(self, rank: "_Rank", client: int, now_s: float) -> bool:
        """Whether one more request of the client's may show how fast a rank is; notes it then."""
        self._clients.append(client)
        share = max(CLIENT_SHARE, self._clients.count(client) / len(self._clients))
        most = ceil(MEMORY * share)
        is_news = now_s - rank.last_s >= CLIENT_WAITS_S
        if most < MEMORY and not is_news and rank.clients.count(client) >= most:
            return False
        rank.clients.append(client)
        return True

    def answered(
        self, slot: Slot, tokens: int, seconds: float, *, step_s: float, client: int = 0, now_s: float
    ) -> None:
        """An answer of so many tokens ended so long after its first one, where decode steps would take one of
        slowness 1 ``step_s``.
        """
        self._ensure_slots(slot + 1)
        self._answers += 1
        share = 1.0 / min(self._answers, ANSWERS)
        slowness = float(self._decode_slowness[slot])
        self._answer_s += share * (seconds / slowness - self._answer_s)
        if tokens < ANSWER_TOKENS_MIN or step_s <= 0.0:
            return
        rank = self._decoding.get(slot)
        if rank is None:
            rank = self._decoding[slot] = _Rank()
        if not self._counts(rank, client, now_s):
            return
        rank.note(step_s, seconds / (tokens - 1), slowness, now_s)
        if not self._decode_is_settled:
            self._refresh_slowness(now_s)
        self._decode_slowness[slot] = rank.slowness(self._decode_mean, now_s)

    def fleet_changed(self) -> None:
        """Engines that do not answer start again, cold: what they took before is forgotten."""
        columns = self._fleet.columns
        silent = np.flatnonzero(columns.present & (columns.engine_silent | ~columns.alive)).tolist()
        found = [ranks.get(Slot(slot)) for slot in silent for ranks in (self._ranks, self._decoding)]
        known = [rank for rank in found if rank is not None and (rank.n_seen or rank.warm_s < inf)]
        for rank in known:
            rank.forget()
        if known:
            self._refresh_slowness(self._refreshed_s)

    def freed(self, slot: Slot) -> None:
        """The slot's rank is gone."""
        rank = self._ranks.pop(slot, None)
        if rank is not None and rank.who is not None:
            self.events.rank_gone(rank.who)
        self._decoding.pop(slot, None)
        self._interference.freed(slot)
        if slot < len(self._slowness):
            self._slowness[slot] = self._mean
            self._decode_slowness[slot] = self._decode_mean
            self._inserted[slot] = self._turnover[slot] = 0.0

    def reading(self, slot: Slot) -> SpeedReading | None:
        """What is known of the slot's rank; None before the first of its requests."""
        rank = self._ranks.get(slot)
        if rank is None:
            return None
        slowness = float(self._slowness[slot])
        return SpeedReading(
            slowness=slowness,
            decode_slowness=float(self._decode_slowness[slot]),
            relative=slowness / self._median,
            requests=rank.n_seen,
            predicted_s=rank.predicted_s,
            seen_s=rank.seen_s,
            is_slow=rank.is_slow,
        )

    def _ensure_slots(self, n_slots: int) -> None:
        if n_slots > len(self._slowness):
            capacity = max(n_slots, 2 * len(self._slowness))
            self._slowness = resized(self._slowness, capacity, self._mean)
            self._decode_slowness = resized(self._decode_slowness, capacity, self._decode_mean)
            self._turnover = resized(self._turnover, capacity, 0.0)
            self._inserted = resized(self._inserted, capacity, 0.0)

    def _judge(self, rank: "_Rank", who: WorkerRank, slowness: float) -> None:
        if rank.n_seen < SLOW_REQUESTS or len(self._ranks) < 2:
            return
        relative = slowness / self._median
        is_slow = relative > (WELL if rank.is_slow else SLOW)
        if is_slow != rank.is_slow:
            rank.is_slow = is_slow
            self.events.turned(who, is_slow=is_slow, slowness=relative)

    def _insert(self, slot: Slot, tokens: int, now_s: float) -> None:
        self._inserted[slot] += tokens * 2.0 ** ((now_s - self._base_s) / TURNOVER_S)
        mean = self._mean_inserted.get(bool(self._fleet.columns.prefill[slot]), 0.0)
        if mean > 0.0:
            self._turnover[slot] = _turnover(float(self._inserted[slot]) / mean)

    def _refresh(self, now_s: float) -> None:
        """Let what is old count less, and columns be of now."""
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
        self._refresh_slowness(now_s)

    def _refresh_slowness(self, now_s: float) -> None:
        known, self._is_settled = _known(self._ranks)
        if known:
            self._mean, self._median = sum(known) / len(known), known[(len(known) - 1) // 2]
        decoding, self._decode_is_settled = _known(self._decoding)
        if decoding:
            self._decode_mean = sum(decoding) / len(decoding)
        for slowness, ranks, mean in (
            (self._slowness, self._ranks, self._mean),
            (self._decode_slowness, self._decoding, self._decode_mean),
        ):
            slowness[:] = mean
            for slot, rank in ranks.items():
                slowness[slot] = rank.slowness(mean, now_s)


def _turnover(ratio: float) -> float:
    """The turnover of a cache into which came so many times what came into the others' on average."""
    lead = log(max(ratio, TURNOVER_FLOOR / 2))
    near = min(max(lead, -TURNOVER_ALIKE), TURNOVER_ALIKE)
    return max(lead - near - log(TURNOVER_FLOOR), 0.0)


def _known(ranks: Mapping[Slot, "_Rank"]) -> tuple[list[float], bool]:
    """The slowness of ranks that were seen often enough, the least first, and whether there are any. Without,
    that of all that were seen: what the first requests show is of the timing rather than of their rank.
    """
    known = sorted(rank.own() for rank in ranks.values() if rank.n_seen >= SLOW_REQUESTS)
    return (known, True) if known else (sorted(rank.own() for rank in ranks.values() if rank.n_seen), False)


class _Rank:
    """What the last requests of one rank took."""

    __slots__ = (
        "_n_predicted",
        "_plain",
        "_taken",
        "clients",
        "is_slow",
        "last_s",
        "n_seen",
        "predicted_s",
        "seen_s",
        "warm_s",
        "who",
    )

    def __init__(self) -> None:
        self._plain = self._taken = self.last_s = 0.0
        self.clients: deque[int] = deque(maxlen=MEMORY)
        """Whose requests its last ones were."""
        self._n_predicted = 0
        self.n_seen = 0
        self.predicted_s = self.seen_s = 0.0
        self.is_slow = False
        self.warm_s = inf
        """When the first answer came since its engine started."""
        self.who: WorkerRank | None = None

    def forget(self) -> None:
        """Its engine starts again: nothing is known of its speed any more."""
        self._plain = self._taken = 0.0
        self.n_seen = 0
        self.clients.clear()
        self.warm_s = inf

    def predicted(self, predicted_s: float, seen_s: float) -> None:
        """A prediction, and what came."""
        self._n_predicted += 1
        share = 1.0 / min(self._n_predicted, MEMORY)
        self.predicted_s += share * (predicted_s - self.predicted_s)
        self.seen_s += share * (seen_s - self.seen_s)

    def note(self, plain_s: float, taken_s: float, slowness: float, now_s: float) -> None:
        """A request took so long that would have taken a rank of slowness 1 ``plain_s``."""
        keep = 1.0 - 1.0 / MEMORY
        # the first ones may show that the timing is of another engine, which all ranks then differ from
        least_s = plain_s * slowness / CLIP if self.n_seen >= SLOW_REQUESTS else 0.0
        bounded_s = min(max(taken_s, least_s), plain_s * slowness * CLIP)
        self._plain = keep * self._plain + plain_s * plain_s
        self._taken = keep * self._taken + plain_s * bounded_s
        self.last_s = now_s
        self.n_seen += 1

    def own(self) -> float:
        """What its own requests say, of which there are some; within what hardware can differ by."""
        return min(max(self._taken / self._plain, SLOWNESS_MIN), SLOWNESS_MAX)

    def slowness(self, others: float, now_s: float) -> float:
        """The rank's slowness now, where the others' is ``others``."""
        if self.n_seen == 0:
            return others
        caution = CAUTION * max(0.0, 1.0 - self.n_seen / MEMORY) / min(self.n_seen, MEMORY)
        own = (self.own() + caution * others) / (1.0 + caution)
        kept: float = 2.0 ** -(max(0.0, now_s - self.last_s) / FORGET_S)
        lead = (own - others) * kept
        return others if abs(lead) <= ALIKE * others else others + lead
