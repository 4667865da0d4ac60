"""Learned speeds of worker ranks, from the times of requests to the first token and between tokens.

:mod:`kvrouter.kernel.placement.slowness` computes the slowness of a rank. Requests that waited for KV memory
or a seat are not measured. Nor are slow requests that were placed before the first answer of an engine since
its start: it is cold, and a rank that counted as slow for that would get no requests for minutes while others
are not busy.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from math import ceil, inf, log
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import ModelName, Slot, WorkerRank
from kvrouter.kernel.fleet.columns import resized
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.interference import Interference
from kvrouter.kernel.placement.kept_speeds import SECONDS_MAX, KeptRank, KeptSpeeds
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.placement.slowness import (
    RECENT_REQUESTS,
    RECOVERED,
    SETTLED_REQUESTS,
    SLOW,
    RankTimes,
    Slowness,
)
from kvrouter.kernel.routing.costs.time import ANSWER_S
from kvrouter.kernel.routing.interface import Pick, Speeds

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

_LOG_FLOOR = log(TURNOVER_FLOOR)
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
    trial_s: float = 0.0
    """The seconds that are reserved for it as a trial of a slow rank."""


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
        self._prompts, self._steps = Slowness(), Slowness()
        self._turnover: npt.NDArray[np.float64] = np.zeros(16)
        self._inserted: npt.NDArray[np.float64] = np.zeros(16)
        """The tokens inserted into each cache, each weighed 2^((its time − ``_base_s``) / TURNOVER_S)."""
        self._step_began_s: npt.NDArray[np.float64] = np.full(16, -inf)
        self._shown = (
            self._prompts.column[:0],
            self._steps.column[:0],
            self._turnover[:0],
            self._step_began_s[:0],
        )
        """Their first entries, as they were last returned."""
        self._base_s, self._refreshed_s = 0.0, -inf
        self._mean_inserted: dict[bool, float] = {}
        """The mean inserted tokens, by role: of ranks that only prefill (True), and of the others."""
        self._answer_s = ANSWER_S
        self._answers = 0
        self._step_s = 0.0
        """A decode step at slowness 1, in the last measured answer."""
        self._clients: deque[int] = deque(maxlen=CLIENTS_SEEN)
        self._interference = Interference()

    def speeds(self, n_slots: int, *, now_s: float) -> Speeds:
        """Return the current speeds; the next call reuses the columns."""
        self._ensure_slots(n_slots)
        if now_s - self._refreshed_s >= _REFRESH_S:
            self._refresh(now_s)
        if len(self._shown[0]) != n_slots:
            self._show(n_slots)
        return Speeds(*self._shown, now_s, self._answer_s, self._interference.share)

    @property
    def has_trials(self) -> bool:
        """Whether slow ranks may be tried, so that speeds depend on the request."""
        return self._prompts.has_trials or self._steps.has_trials

    def offer(self, prompt_s: float) -> None:
        """Set the columns of the current speeds for a prompt that takes so long at slowness 1."""
        self._prompts.offer(prompt_s)
        self._steps.offer(self._step_s)

    def decode_slowness(self, slot: Slot) -> float:
        """Return the duration of a decode step at the slot, relative to the settings' timing."""
        return self._steps.known.item(slot) if slot < len(self._steps.known) else self._steps.median

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
        trial_s = self._prompts.begin_trial(slot, plain_s)
        return Expected(slot, pick.rank, now_s, plain_s, steps_s, expected_s, is_clear, trial_s)

    def step_began(self, slot: Slot, *, now_s: float) -> None:
        """Record that a step with prompt tokens begins at the slot, if any are queued there."""
        self._ensure_slots(slot + 1)
        self._step_began_s[slot] = now_s

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
        self._prompts.note(slot, plain_s, taken_s, now_s, trial_s=expected.trial_s)
        if expected.at_s - rank.judged_s >= JUDGED_EVERY_S:
            rank.judged_s = expected.at_s
            rank.judged(taken_s / (self._prompts.median * plain_s))
        self._judge(rank, expected.rank, rank.estimate(self._prompts.median))

    def _counts(self, rank: RankTimes, client: int, now_s: float) -> bool:
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
        self._answer_s += share * (seconds / self._steps.known.item(slot) - self._answer_s)
        if tokens < ANSWER_TOKENS_MIN or step_s <= 0.0:
            return
        if self._counts(self._steps.rank_at(slot), client, now_s):
            self._step_s = step_s
            self._steps.note(slot, step_s, seconds / (tokens - 1), now_s)

    def fleet_changed(self) -> None:
        """Drop the measurements of ranks whose engines do not answer: they will start again, cold."""
        columns = self._fleet.columns
        silent = np.flatnonzero(columns.present & (columns.engine_silent | ~columns.alive)).tolist()
        self.forget(map(Slot, silent))

    def forget(self, slots: Iterable[Slot]) -> None:
        """Drop the measurements of the ranks at ``slots``: their engines start again, or did."""
        found: list[RankTimes | None] = []
        for slot in slots:
            found += self._prompts.ranks.get(slot), self._steps.ranks.get(slot)
            self._interference.freed(slot)
            self.step_began(slot, now_s=-inf)
        known = [rank for rank in found if rank is not None and (rank.n_seen or rank.warm_s < inf)]
        for rank in known:
            rank.forget()
        if known:
            self._prompts.refresh()
            self._steps.refresh()

    def freed(self, slot: Slot) -> None:
        """Remove the slot's rank."""
        rank = self._prompts.freed(slot)
        if rank is not None and rank.worker_rank is not None:
            self.events.rank_gone(rank.worker_rank)
        self._steps.freed(slot)
        self._interference.freed(slot)
        if slot < len(self._inserted):
            self._inserted[slot] = self._turnover[slot] = 0.0
            self._step_began_s[slot] = -inf

    def may_be_outdated(self, slot: Slot, *, now_s: float) -> bool:
        """Whether no request was measured at the slot's rank for :data:`CLIENT_WAITS_S`."""
        rank = self._prompts.ranks.get(slot)
        return rank is None or now_s - rank.last_s >= CLIENT_WAITS_S

    def reading(self, slot: Slot) -> SpeedReading | None:
        """Return the measured speed of the slot's rank; None before its first request."""
        rank = self._prompts.ranks.get(slot)
        if rank is None:
            return None
        slowness = self._prompts.known.item(slot)
        return SpeedReading(
            slowness=slowness,
            decode_slowness=self._steps.known.item(slot),
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
            self._step_began_s = resized(self._step_began_s, capacity, -inf)
            self._show(len(self._shown[0]))

    def _show(self, n_slots: int) -> None:
        self._shown = (
            self._prompts.column[:n_slots],
            self._steps.column[:n_slots],
            self._turnover[:n_slots],
            self._step_began_s[:n_slots],
        )

    def _judge(self, rank: RankTimes, worker_rank: WorkerRank, slowness: float) -> None:
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
        """Decay inserted tokens, and update the columns."""
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
        self._prompts.refresh()
        self._steps.refresh()

    # Kept over a restart

    def kept(self, model: ModelName, timing: str, *, now_s: float) -> KeptSpeeds:
        """Return what was learned, relative to the timing with that digest."""
        return KeptSpeeds(
            model=model,
            timing=timing,
            prompt_noise=self._prompts.kept_noise(),
            step_noise=self._steps.kept_noise(),
            answers=self._answers,
            answer_s=min(self._answer_s, SECONDS_MAX),
            ranks=tuple(self._kept_ranks(now_s)),
        )

    def _kept_ranks(self, now_s: float) -> Iterator[KeptRank]:
        """Yield what was learned of each rank."""
        for slot in self._prompts.ranks.keys() | self._steps.ranks.keys():
            card, rank = self._fleet.card_at(slot), self._fleet.rank_at(slot)
            if card is None or rank is None:
                continue
            prompts, steps = self._prompts.ranks.get(slot), self._steps.ranks.get(slot)
            yield KeptRank(
                rank=rank,
                incarnation=card.incarnation,
                engine_url=card.engine_url,
                engine_start=card.engine_start,
                prompts=None if prompts is None else prompts.kept_prompts(self._prompts.total_s, now_s),
                steps=None if steps is None else steps.kept_times(self._steps.total_s, now_s),
                moments=self._interference.kept(slot),
                inserted_tokens=self._inserted.item(slot) * 2.0 ** ((self._base_s - now_s) / TURNOVER_S),
            )

    def recall(self, shared: KeptSpeeds, slot: Slot, kept: KeptRank, *, aged_s: float, now_s: float) -> None:
        """Set what was kept of a rank ``aged_s`` ago, and of all ranks together; nothing that was measured
        since is replaced.
        """
        self._prompts.recall_noise(shared.prompt_noise)
        self._steps.recall_noise(shared.step_noise)
        if not self._answers:
            self._answers, self._answer_s = shared.answers, shared.answer_s
        self._ensure_slots(slot + 1)
        if slot in self._prompts.ranks or slot in self._steps.ranks:
            return
        if self._refreshed_s == -inf:
            self._refresh(now_s)
        saved_s = now_s - aged_s
        if kept.prompts is not None:
            rank = self._prompts.rank_at(slot)
            rank.worker_rank = kept.rank
            rank.recall_prompts(kept.prompts, self._prompts.total_s, saved_s)
        if kept.steps is not None:
            self._steps.rank_at(slot).recall(kept.steps, self._steps.total_s, saved_s)
        if kept.moments is not None:
            self._interference.recall(slot, kept.moments)
        self._inserted[slot] = kept.inserted_tokens * 2.0 ** ((saved_s - self._base_s) / TURNOVER_S)
        self._refreshed_s = min(self._refreshed_s, now_s - _REFRESH_S)


def _turnover(ratio: float) -> float:
    """Return the turnover of a cache with ``ratio`` times the mean insertions."""
    lead = log(max(ratio, TURNOVER_FLOOR / 2))
    near = min(max(lead, -TURNOVER_ALIKE), TURNOVER_ALIKE)
    return max(lead - near - _LOG_FLOOR, 0.0)
