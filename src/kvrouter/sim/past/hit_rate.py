"""How much of the prompts was found in caches, and where the rest was lost: one pass over a recorded past.

Three kinds of caches are filled with the recorded requests, in the order of their decisions: one that is
shared by the whole fleet, the workers' own where each request goes where most of its prefix is, and the
workers' own where each request goes where it went. What the router expected, and what engines counted, is
recorded.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import BoolColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import PrefixSet
from kvrouter.kernel.routing.masks import mask_of, prefill_mask, ready, screen_ranks, screens_of
from kvrouter.kernel.topology.policy import MismatchPolicy, RouterTopologyDefault
from kvrouter.recording.schema import AttemptRecord, LegRecord, Worker
from kvrouter.sim.past.fleet_history import Move
from kvrouter.sim.past.hit_ladder import (
    Cause,
    HitCounts,
    HitLadder,
    Larger,
    Rung,
    RungFigure,
    largest_of,
    losses_of,
)
from kvrouter.sim.past.past_caches import (
    ENDLESS_BLOCKS,
    RANKS_ASKED,
    U32,
    PastPrompt,
    RankCaches,
    SharedCache,
    past_prompt,
)
from kvrouter.sim.past.past_fleet import Moved, PastFleet, leg_called, rank_of
from kvrouter.sim.traces.recorded_trace import Past, PastRequest

FACTORS = (2, 4)
"""The sizes of the fleet's caches that are tried too, as factors."""

KIND_SHARE_MIN = 0.1
"""Workers of a kind, for prefill or for whole requests, are the fleet that computes prompts if they took at
least this share of the requests.
"""

KvBlocksOf = Callable[[Worker], int | None]
"""How many KV blocks each rank of a worker has."""


class _Placed(NamedTuple):
    """A leg that was sent, in the order of its decision. ``is_measured``: it computed the prompt in the last
    attempt; ``computes``: it computes a prompt, and fetches none.
    """

    at_s: float
    number: int
    order: int
    until_s: float
    leg: LegRecord
    attempt: AttemptRecord
    computes: bool
    is_measured: bool


class _Evidence(NamedTuple):
    """The evidence of one request on the index: whether it knew the rank's blocks."""

    at_s: float
    was_blind: bool


class _ChosenAgainst(NamedTuple):
    """Tokens that a rejected candidate had; ``has_more_load`` than the chosen one."""

    at_s: float
    rank: WorkerRank | None
    tokens: int
    has_more_load: bool


def _ignore(_: float) -> None:
    """Show no progress."""


def hit_ladder(
    past: Past, kv_blocks_of: KvBlocksOf | None = None, *, on_share: Callable[[float], None] = _ignore
) -> HitLadder:
    """Return the ladder of a recording. ``kv_blocks_of`` returns the workers' sizes, by default from their
    cards. ``on_share`` is called with the share of the placements that are looked at.

    Raises ConfigError if no recorded request reached a worker, and for requests that a recording cannot have.
    """
    placed = _placed(past)
    if not any(each.is_measured for each in placed):
        raise ConfigError("recording: no request in it reached a worker", param="recording")
    climb = _Climb(past, placed, kv_blocks_of or (lambda worker: worker.kv_blocks))
    for number, each in enumerate(placed, 1):
        climb.take(each)
        on_share(number / len(placed))
    return climb.result()


def _placed(past: Past) -> list[_Placed]:
    """The legs that were sent, in the order of time."""
    found: list[_Placed] = []
    for request in past.requests:
        record = request.record
        tries: list[tuple[AttemptRecord, LegRecord]] = []
        for attempt in record.attempts:
            leg = leg_called(attempt.legs, Leg.PREFILL) or (attempt.legs[0] if attempt.legs else None)
            if leg is not None and leg.sent_s is not None:
                tries.append((attempt, leg))
        for at, (attempt, leg) in enumerate(tries):
            is_last = at == len(tries) - 1
            ended_s = request.at_s + (record.ended_s if leg.last_s is None else leg.last_s)
            begins_s = request.at_s + attempt.placed_s
            found.append(
                _Placed(begins_s, request.number, at, max(begins_s, ended_s), leg, attempt, True, is_last)
            )
            decode = leg_called(attempt.legs, Leg.DECODE)
            if leg.leg == Leg.PREFILL and decode is not None and decode.sent_s is not None:
                begins_s = request.at_s + decode.sent_s
                ended_s = request.at_s + (record.ended_s if decode.last_s is None else decode.last_s)
                found.append(
                    _Placed(
                        begins_s, request.number, at, max(begins_s, ended_s), decode, attempt, False, False
                    )
                )
    found.sort(key=lambda each: (each.at_s, each.number, each.order, not each.computes))
    return found


class _FleetCaches:
    """The fleet at each moment of the past, and the three kinds of caches: ``shared`` by factor of its size,
    ``perfect`` where each request goes where most of its prefix is, and the workers' ``own``.

    ``legs`` are those of the workers that are the fleet which computes prompts.
    """

    def __init__(self, past: Past, legs: Sequence[Leg], kv_blocks_of: KvBlocksOf) -> None:
        self.past = PastFleet(past.fleet)
        self.shared = {factor: SharedCache() for factor in (1, *FACTORS)}
        is_indexed = _n_ranks(past) > RANKS_ASKED
        self.perfect, self.own = RankCaches(is_indexed=is_indexed), RankCaches(is_indexed=is_indexed)
        self.fleet_blocks: int | None = 0
        """The most that the fleet had; None where the size of a worker was unknown."""
        self.without_size: set[str] = set()
        self.workers_left = self.blocks_left = 0
        self._legs = legs
        self._kv_blocks_of = kv_blocks_of
        self._size_of: dict[Slot, int | None] = {}
        for moved in self.past.initial:
            self._apply(moved)

    def go_to(self, at_s: float) -> None:
        """Let all happen that happened to the fleet until then."""
        while (next_s := self.past.next_s) is not None and next_s <= at_s:
            self._release_until(next_s)
            self._apply(self.past.step())
        self._release_until(at_s)

    def route_perfectly(self, prompt: PastPrompt, until_s: float) -> int:
        """Send a request to its longest prefix, else to the most free blocks; return its cached blocks."""
        fleet = self.past.fleet
        takes = np.zeros(fleet.n_slots, np.bool_)
        for leg in self._legs:
            takes |= ready(fleet, leg, last_resort=True).allowed
        slots: npt.NDArray[np.int64] = np.flatnonzero(takes)
        if not len(slots):
            return 0
        overlap = self.perfect.overlap(prompt, fleet.n_slots)[slots]
        most = int(overlap.max())
        slot = self.perfect.emptiest(slots[overlap == most])
        self.perfect.hold(slot, prompt, until_s=until_s)
        return most

    def _apply(self, moved: Moved) -> None:
        for slot in moved.freed:
            self.blocks_left += self.own.leave(slot)
            self.perfect.leave(slot)
            self._size_of.pop(slot, None)
        self.workers_left += bool(moved.freed) and moved.move is not Move.CHANGED
        size = self._kv_blocks_of(moved.worker) if moved.joined else None
        for slot in moved.joined:
            self._size_of[slot] = size
            self.own.join(slot, size)
            self.perfect.join(slot, size)
            if size is None:
                self.without_size.add(moved.worker.worker)
        counts = np.zeros(self.past.fleet.n_slots, np.bool_)
        for leg in self._legs:
            counts |= _of_role(self.past.fleet, leg)
        sizes = [size for slot, size in self._size_of.items() if counts[slot]]
        if None in sizes:
            n_blocks, self.fleet_blocks = ENDLESS_BLOCKS, None
        else:
            n_blocks = sum(size for size in sizes if size is not None)
            if self.fleet_blocks is not None:
                self.fleet_blocks = max(self.fleet_blocks, n_blocks)
        for factor, cache in self.shared.items():
            cache.resize(factor * n_blocks)

    def _release_until(self, now_s: float) -> None:
        for cache in self.shared.values():
            cache.release_until(now_s)
        self.perfect.release_until(now_s)
        self.own.release_until(now_s)


class _Choices:
    """Why requests did not go where most of their prefix was, into ``lost``."""

    def __init__(self, caches: _FleetCaches, lost: Counter[Cause]) -> None:
        self._caches = caches
        self._lost = lost
        self._evidence: defaultdict[WorkerRank, list[_Evidence]] = defaultdict(list)
        self._against: list[_ChosenAgainst] = []

    def saw(self, rank: WorkerRank, at_s: float, *, was_blind: bool) -> None:
        """Take the evidence on the index of a request that went to this rank."""
        self._evidence[rank].append(_Evidence(at_s, was_blind))

    def note(
        self, placed: _Placed, request: PastRequest, overlap: U32, chosen: int, slot: Slot | None
    ) -> int:
        """Note why the request did not go to its longest prefix; return that prefix's length."""
        past, block_size = self._caches.past, request.record.block_size
        fleet = past.fleet
        leg = Leg.PREFILL if placed.leg.leg == Leg.PREFILL else Leg.AGGREGATED

        def most(allowed: BoolColumn) -> int:
            return max(chosen, int(overlap.max(where=allowed, initial=0)) * block_size)

        nearest = most(_of_role(fleet, leg))
        if nearest == chosen:
            return nearest
        takes = ready(fleet, leg, last_resort=True).allowed
        prompt = past.asks(request, aggregated=leg is Leg.AGGREGATED)
        asked = screen_ranks(prompt, fleet, leg).mask
        allowed = asked
        if leg is Leg.PREFILL:
            default = _router_default(placed.attempt)
            screens = screens_of(prompt, fleet, default, None)
            allowed = prefill_mask(screens, fleet, screens.decode.mask, default)
        at_takes, at_asked, at_allowed = most(takes), most(asked.allowed), most(allowed.allowed)
        self._lost[Cause.AWAY] += nearest - at_takes
        self._lost[Cause.CONSTRAINTS] += at_takes - at_asked
        self._lost[Cause.TRANSFER_POLICY] += at_asked - at_allowed
        lost = at_allowed - chosen
        if not lost:
            return nearest
        if placed.attempt.mode != RouterMode.KV:
            self._lost[Cause.ROUTER_MODE] += lost
        elif 0 < placed.leg.candidates < allowed.n_allowed:
            self._lost[Cause.PASSED_OVER] += lost
        else:
            best = mask_of(allowed.allowed & (overlap == overlap.max(where=allowed.allowed, initial=0)))
            self._against.append(self._against_whom(placed, best.allowed, lost, slot))
        return nearest

    def settle(self) -> None:
        """Say of the candidates that had more and were not chosen why, by all that was seen."""
        for against in self._against:
            self._lost[self._why_against(against)] += against.tokens

    def _against_whom(
        self, placed: _Placed, best: BoolColumn, lost: int, chosen: Slot | None
    ) -> _ChosenAgainst:
        running, held = self._caches.own.running, self._caches.own.held
        slot = min(np.flatnonzero(best).tolist(), key=lambda each: (running[each], held[each]))
        has_more = chosen is not None and bool(running[slot] > running[chosen] or held[slot] > held[chosen])
        return _ChosenAgainst(placed.at_s, self._caches.past.fleet.rank_at(Slot(slot)), lost, has_more)

    def _why_against(self, against: _ChosenAgainst) -> Cause:
        """Return the cause, by the nearest request in time that went to the rejected candidate."""
        evidence = self._evidence.get(against.rank, []) if against.rank is not None else []
        if evidence:
            at = bisect_left(evidence, against.at_s, key=lambda each: each.at_s)
            near = evidence[max(0, at - 1) : at + 1]
            was_blind = min(near, key=lambda each: abs(each.at_s - against.at_s)).was_blind
        else:
            everywhere = [each.was_blind for found in self._evidence.values() for each in found]
            was_blind = 2 * sum(everywhere) > len(everywhere)
        if was_blind:
            return Cause.INDEX
        return Cause.LOAD if against.has_more_load else Cause.UNEXPLAINED


class _Climb:
    """One pass over the requests, and its counts. Tokens are of prompts."""

    def __init__(self, past: Past, placed: list[_Placed], kv_blocks_of: KvBlocksOf) -> None:
        self._past = past
        measured = [each for each in placed if each.is_measured]
        of_pairs = sum(each.leg.leg == Leg.PREFILL for each in measured) / len(measured)
        shares = {Leg.PREFILL: of_pairs, Leg.AGGREGATED: 1.0 - of_pairs}
        legs = [leg for leg, share in shares.items() if share >= KIND_SHARE_MIN]
        self._begin_s, self._span_s = measured[0].at_s, measured[-1].at_s - measured[0].at_s
        self._seen = PrefixSet(max_blocks=1 << 62)
        self._rung: Counter[Rung] = Counter()
        self._held: Counter[int] = Counter()
        self._lost: Counter[Cause] = Counter()
        self._n: Counter[str] = Counter()
        self._first_seen_by_quarter: Counter[int] = Counter()
        self._tokens_by_quarter: Counter[int] = Counter()
        self._caches = _FleetCaches(past, legs, kv_blocks_of)
        self._choices = _Choices(self._caches, self._lost)

    def take(self, placed: _Placed) -> None:
        """Let one leg happen, with all that happened before it."""
        self._caches.go_to(placed.at_s)
        request = self._past.requests[placed.number]
        prompt = past_prompt(request, has_answer=placed.leg.leg != Leg.PREFILL)
        rank = _rank(placed.leg, request)
        slot = self._caches.past.fleet.slot_of(rank)
        if placed.is_measured:
            self._measure(placed, request, prompt, rank, slot)
        if slot is not None:
            self._caches.own.hold(slot, prompt, until_s=placed.until_s)

    def result(self) -> HitLadder:
        """Return the ladder."""
        self._choices.settle()
        rung = self._rung
        found = {Rung.FLEET: self._held[1], Rung.PERFECT: rung[Rung.PERFECT]}
        rung[Rung.PERFECT] = max(rung[Rung.PERFECT], rung[Rung.NEAREST])
        rung[Rung.FLEET] = max(self._held[1], rung[Rung.PERFECT])
        self._lost[Cause.CACHE_SIZE] = rung[Rung.ENDLESS] - rung[Rung.FLEET]
        self._lost[Cause.APART] = rung[Rung.FLEET] - rung[Rung.PERFECT]
        self._lost[Cause.COPIES] = rung[Rung.PERFECT] - rung[Rung.NEAREST]
        prompt_tokens = rung[Rung.PROMPTS]
        losses = losses_of(self._lost, prompt_tokens)
        return HitLadder(
            rungs=tuple(
                RungFigure(
                    each,
                    rung[each],
                    rung[each] / prompt_tokens,
                    found[each] if each in found and found[each] < rung[each] else None,
                )
                for each in Rung
            ),
            losses=losses,
            larger=tuple(
                Larger(factor, max(self._held[factor], rung[Rung.FLEET]),
                       max(self._held[factor], rung[Rung.FLEET]) / prompt_tokens)
                for factor in FACTORS
            ),
            largest=largest_of(losses),
            facts=self._counts(),
        )  # fmt: skip

    def _measure(
        self,
        placed: _Placed,
        request: PastRequest,
        prompt: PastPrompt,
        rank: WorkerRank,
        slot: Slot | None,
    ) -> None:
        record, leg, block_size = request.record, placed.leg, request.record.block_size
        input_tokens, findable_tokens = record.input_tokens, prompt.n_findable * block_size
        seen_tokens = min((self._seen.add(prompt.prompt) or 0), prompt.n_findable) * block_size
        expected = min(leg.overlap_blocks, prompt.n_findable) * block_size
        counted = None if leg.cached_tokens is None else min(leg.cached_tokens, input_tokens)
        known = max(expected, counted or 0)

        def with_beyond(tokens: int) -> int:
            """Unrecorded blocks follow the blocks seen before, if all of these are there."""
            return max(tokens, known) if tokens >= seen_tokens else tokens

        for factor, cache in self._caches.shared.items():
            self._held[factor] += with_beyond(cache.matched(prompt) * block_size)
            cache.hold(prompt, until_s=placed.until_s)
        self._rung[Rung.PERFECT] += with_beyond(
            self._caches.route_perfectly(prompt, placed.until_s) * block_size
        )

        overlap = self._caches.own.overlap(prompt, self._caches.past.fleet.n_slots)
        own = 0 if slot is None else int(overlap[slot]) * block_size
        chosen = max(own, known)
        nearest = self._choices.note(placed, request, overlap, chosen, slot)
        endless = max(seen_tokens, nearest)
        counts = expected if counted is None else counted
        for rung, tokens in (
            (Rung.PROMPTS, input_tokens),
            (Rung.ENDLESS, endless),
            (Rung.NEAREST, nearest),
            (Rung.CHOSEN, chosen),
            (Rung.EXPECTED, expected),
            (Rung.ENGINES, counts),
        ):
            self._rung[rung] += tokens
        not_a_block = min(input_tokens - endless, input_tokens - findable_tokens)
        first_seen = input_tokens - endless - not_a_block
        self._lost[Cause.NOT_A_BLOCK] += not_a_block
        self._lost[Cause.FIRST_SEEN] += first_seen
        self._note_counted(counted, expected, chosen)
        truth = own if counted is None else counted
        if truth > 0:
            self._choices.saw(rank, placed.at_s, was_blind=2 * expected < truth)
        self._note_first_seen(placed.at_s, first_seen, input_tokens)
        self._n.update(
            requests=1,
            unreported=counted is None,
            unreported_tokens=input_tokens if counted is None else 0,
            media=record.media,
            adapters=record.adapter is not None,
            beyond=max(0, known - seen_tokens),
            unexpected=max(0, (counted or 0) - expected),
        )

    def _note_counted(self, counted: int | None, expected: int, chosen: int) -> None:
        """Note how the router's expectation, and the engines' counts, differ from the cached tokens."""
        if counted is None:
            self._lost[Cause.NOT_REPORTED] += chosen - expected
        else:
            self._lost[Cause.UNSEEN] += max(0, counted - expected)
            self._lost[Cause.EVICTED] += chosen - max(expected, counted)
            self._lost[Cause.STALE] += max(0, expected - counted)

    def _note_first_seen(self, at_s: float, first_seen: int, input_tokens: int) -> None:
        quarter = min(3, int(4.0 * (at_s - self._begin_s) / self._span_s)) if self._span_s else 3
        self._first_seen_by_quarter[quarter] += first_seen
        self._tokens_by_quarter[quarter] += input_tokens

    def _counts(self) -> HitCounts:
        n = self._n
        rate = 0.0
        if self._tokens_by_quarter[3]:
            rate = self._first_seen_by_quarter[3] / self._tokens_by_quarter[3]
        warm_up = sum(
            max(0.0, self._first_seen_by_quarter[quarter] - rate * self._tokens_by_quarter[quarter])
            for quarter in range(3)
        )
        return HitCounts(
            requests=n["requests"],
            prompt_tokens=self._rung[Rung.PROMPTS],
            left_out=len(self._past.requests) - n["requests"],
            unreported=n["unreported"],
            unreported_tokens=n["unreported_tokens"],
            media=n["media"],
            adapters=n["adapters"],
            warm_up_tokens=round(warm_up),
            beyond_tokens=n["beyond"],
            found_unexpected_tokens=n["unexpected"],
            workers_left=self._caches.workers_left,
            blocks_left=self._caches.blocks_left,
            fleet_blocks=self._caches.fleet_blocks,
            workers_without_size=len(self._caches.without_size),
        )


def _of_role(fleet: Fleet, leg: Leg) -> BoolColumn:
    """The slots of workers that are there for this leg: prefill, or whole requests."""
    columns = fleet.columns
    return columns.prefill if leg is Leg.PREFILL else columns.decode_or_both & ~columns.decode_only


def _n_ranks(past: Past) -> int:
    """How many ranks there were, at any time."""
    sizes = {each.worker.worker: each.worker.dp_size for each in past.fleet.recorded}
    return sum(sizes.values())


def _rank(leg: LegRecord, request: PastRequest) -> WorkerRank:
    try:
        return rank_of(leg)
    except ValueError as error:
        raise ConfigError(
            f"{request.path}:{request.line}: legs: worker: {leg.worker!r} is no worker's rank",
            param=str(request.path),
        ) from error


def _router_default(attempt: AttemptRecord) -> RouterTopologyDefault | None:
    """Return the router's own policy from the constraint of a decision; workers' own take precedence."""
    enforcement, _, place = (attempt.constraint or "").partition(" ")
    level = place.partition("=")[0]
    if not level or enforcement not in ("required", "fallback"):
        return None
    policy = MismatchPolicy.FAIL if enforcement == "required" else MismatchPolicy.FALLBACK
    return RouterTopologyDefault(level, policy)
