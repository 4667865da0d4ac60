"""How much of the prompts was found in caches, and where the rest was lost: one pass over a recorded past.

Three kinds of caches are filled with the recorded requests, in the order of their decisions: one that is
shared by the whole fleet, the workers' own where each request goes where most of its prefix is, and the
workers' own where each request goes where it went. What the router expected, and what engines counted, is
recorded.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.fleet import BoolColumn
from kvrouter.index import PrefixSet
from kvrouter.recording.records import AttemptRecord, LegRecord, Worker
from kvrouter.routing.masks import mask_of, prefill_mask, ready, screen, screens_of
from kvrouter.sim.fleet_history import Move
from kvrouter.sim.hit_ladder import (
    Cause,
    HitFacts,
    HitLadder,
    Larger,
    Rung,
    RungFigure,
    largest_of,
    losses_of,
)
from kvrouter.sim.past_caches import (
    ENDLESS_BLOCKS,
    RANKS_ASKED,
    U32,
    PastPrompt,
    RankCaches,
    SharedCache,
    past_prompt,
)
from kvrouter.sim.past_fleet import Moved, PastFleet, leg_called, rank_of
from kvrouter.sim.traces.recording import Past, PastRequest
from kvrouter.topology import MismatchPolicy, RouterTopologyDefault

FACTORS = (2, 4)
"""The sizes of the fleet's caches that are tried too, by how many times as large they are."""

KIND_SHARE_MIN = 0.1
"""Workers of a kind, for prefill or for whole requests, are the fleet that computes prompts if they took at
least this share of the requests.
"""

KvBlocksOf = Callable[[Worker], int | None]
"""How many KV blocks each rank of a worker has."""


class _Placed(NamedTuple):
    """A leg that was sent, in the order of its decision. ``is_measured``: it is the one that computed the
    prompt in the last attempt; ``computes``: it computes a prompt, and fetches none.
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
    """What one request shows of the index: whether it knew what the rank held."""

    at_s: float
    was_blind: bool


class _ChosenAgainst(NamedTuple):
    """Tokens that a candidate had and that was not chosen; ``has_more_load`` than the one that was."""

    at_s: float
    rank: WorkerRank | None
    tokens: int
    has_more_load: bool


def hit_ladder(past: Past, kv_blocks_of: KvBlocksOf | None = None) -> HitLadder:
    """Return the ladder of a recording. ``kv_blocks_of`` says the workers' sizes; by default their cards do.

    Raises ConfigError where no recorded request reached a worker, and for what a recording could not have.
    """
    placed = _placed(past)
    if not any(each.is_measured for each in placed):
        raise ConfigError("recording: no request in it reached a worker", param="recording")
    climb = _Climb(past, placed, kv_blocks_of or (lambda worker: worker.kv_blocks))
    for each in placed:
        climb.take(each)
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


class _Climb:
    """The pass, and what it counts. Tokens are of prompts."""

    def __init__(self, past: Past, placed: list[_Placed], kv_blocks_of: KvBlocksOf) -> None:
        self._past = past
        self._kv_blocks_of = kv_blocks_of
        self._fleet = PastFleet(past.fleet)
        measured = [each for each in placed if each.is_measured]
        of_pairs = sum(each.leg.leg == Leg.PREFILL for each in measured) / len(measured)
        self._prefill_counts = of_pairs >= KIND_SHARE_MIN
        self._whole_counts = 1.0 - of_pairs >= KIND_SHARE_MIN
        self._begin_s, self._span_s = measured[0].at_s, measured[-1].at_s - measured[0].at_s
        self._seen = PrefixSet(max_blocks=1 << 62)
        self._shared = {factor: SharedCache() for factor in (1, *FACTORS)}
        is_indexed = _n_ranks(past) > RANKS_ASKED
        self._perfect, self._own = RankCaches(is_indexed=is_indexed), RankCaches(is_indexed=is_indexed)
        self._size_of: dict[Slot, int | None] = {}
        self._fleet_blocks = 0
        self._sizes_known = True
        self._without_size: set[str] = set()
        self._rung: Counter[Rung] = Counter()
        self._held: Counter[int] = Counter()
        self._lost: Counter[Cause] = Counter()
        self._n: Counter[str] = Counter()
        self._first_seen_by_quarter: Counter[int] = Counter()
        self._tokens_by_quarter: Counter[int] = Counter()
        self._evidence: defaultdict[WorkerRank, list[_Evidence]] = defaultdict(list)
        self._against: list[_ChosenAgainst] = []
        for moved in self._fleet.initial:
            self._apply(moved)

    def take(self, placed: _Placed) -> None:
        """Let one leg happen, with all that happened before it."""
        while (next_s := self._fleet.next_s) is not None and next_s <= placed.at_s:
            self._release_until(next_s)
            self._apply(self._fleet.step())
        self._release_until(placed.at_s)
        request = self._past.requests[placed.number]
        wanted = past_prompt(request, has_answer=placed.leg.leg != Leg.PREFILL)
        rank = _rank(placed.leg, request)
        slot = self._fleet.fleet.slot_of(rank)
        if placed.is_measured:
            self._measure(placed, request, wanted, rank, slot)
        if slot is not None:
            self._own.hold(slot, wanted, until_s=placed.until_s)

    def result(self) -> HitLadder:
        """Return the ladder."""
        for against in self._against:
            self._lost[self._why_against(against)] += against.tokens
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
            facts=self._facts(),
        )  # fmt: skip

    # The fleet

    def _apply(self, moved: Moved) -> None:
        for slot in moved.freed:
            self._n["blocks_left"] += self._own.leave(slot)
            self._perfect.leave(slot)
            self._size_of.pop(slot, None)
        if moved.freed and moved.move is not Move.CHANGED:
            self._n["workers_left"] += 1
        size = self._kv_blocks_of(moved.worker) if moved.joined else None
        for slot in moved.joined:
            self._size_of[slot] = size
            self._own.join(slot, size)
            self._perfect.join(slot, size)
            if size is None:
                self._without_size.add(moved.worker.worker)
        counts = self._counts()
        sizes = [size for slot, size in self._size_of.items() if counts[slot]]
        if None in sizes:
            self._sizes_known = False
            n_blocks = ENDLESS_BLOCKS
        else:
            n_blocks = sum(size for size in sizes if size is not None)
            self._fleet_blocks = max(self._fleet_blocks, n_blocks)
        for factor, cache in self._shared.items():
            cache.resize(factor * n_blocks)

    def _counts(self) -> BoolColumn:
        """The slots whose workers are the fleet that computes prompts."""
        columns = self._fleet.fleet.columns
        nobody = np.zeros(self._fleet.fleet.n_slots, np.bool_)
        found = columns.prefill if self._prefill_counts else nobody
        return found | (columns.decode_or_both & ~columns.decode_only) if self._whole_counts else found

    def _release_until(self, now_s: float) -> None:
        for cache in self._shared.values():
            cache.release_until(now_s)
        self._perfect.release_until(now_s)
        self._own.release_until(now_s)

    # One request

    def _measure(
        self,
        placed: _Placed,
        request: PastRequest,
        wanted: PastPrompt,
        rank: WorkerRank,
        slot: Slot | None,
    ) -> None:
        record, leg, block_size = request.record, placed.leg, request.record.block_size
        input_tokens, findable_tokens = record.input_tokens, wanted.n_findable * block_size
        seen = min((self._seen.add(wanted.prompt) or 0), wanted.n_findable) * block_size
        expected = min(leg.overlap_blocks, wanted.n_findable) * block_size
        counted = None if leg.cached_tokens is None else min(leg.cached_tokens, input_tokens)
        known = max(expected, counted or 0)

        def with_beyond(tokens: int) -> int:
            """Blocks that nobody recorded follow those that were seen before, where all of these are."""
            return max(tokens, known) if tokens >= seen else tokens

        for factor, cache in self._shared.items():
            self._held[factor] += with_beyond(cache.matched(wanted) * block_size)
            cache.hold(wanted, until_s=placed.until_s)
        self._rung[Rung.PERFECT] += with_beyond(self._route_perfectly(wanted, placed.until_s) * block_size)

        n_slots = self._fleet.fleet.n_slots
        overlap = self._own.overlap(wanted, n_slots)
        own = 0 if slot is None else int(overlap[slot]) * block_size
        chosen = max(own, known)
        nearest = self._note_choice(placed, request, overlap, chosen, slot)
        endless = max(seen, nearest)
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
        if counted is None:
            self._lost[Cause.NOT_REPORTED] += chosen - expected
        else:
            self._lost[Cause.UNSEEN] += max(0, counted - expected)
            self._lost[Cause.EVICTED] += chosen - known
            self._lost[Cause.STALE] += max(0, expected - counted)
        truth = own if counted is None else counted
        if truth > 0:
            self._evidence[rank].append(_Evidence(placed.at_s, 2 * expected < truth))
        quarter = min(3, int(4.0 * (placed.at_s - self._begin_s) / self._span_s)) if self._span_s else 3
        self._first_seen_by_quarter[quarter] += first_seen
        self._tokens_by_quarter[quarter] += input_tokens
        self._n.update(
            requests=1,
            unreported=counted is None,
            unreported_tokens=input_tokens if counted is None else 0,
            media=record.media,
            adapters=record.adapter is not None,
            beyond=max(0, known - seen),
            unexpected=max(0, (counted or 0) - expected),
        )

    def _route_perfectly(self, wanted: PastPrompt, until_s: float) -> int:
        """Send a request where most of its prefix is, else where there is most room; return the blocks."""
        fleet = self._fleet.fleet
        takes = np.zeros(fleet.n_slots, np.bool_)
        if self._prefill_counts:
            takes |= ready(fleet, Leg.PREFILL, last_resort=True).allowed
        if self._whole_counts:
            takes |= ready(fleet, Leg.AGGREGATED, last_resort=True).allowed
        slots: npt.NDArray[np.int64] = np.flatnonzero(takes)
        if not len(slots):
            return 0
        overlap = self._perfect.overlap(wanted, fleet.n_slots)[slots]
        most = int(overlap.max())
        slot = self._perfect.emptiest(slots[overlap == most])
        self._perfect.hold(slot, wanted, until_s=until_s)
        return most

    # The choice

    def _note_choice(
        self, placed: _Placed, request: PastRequest, overlap: U32, chosen: int, slot: Slot | None
    ) -> int:
        """Note why the request did not go where most of its prefix was; return how much was there."""
        fleet, block_size = self._fleet.fleet, request.record.block_size
        leg = Leg.PREFILL if placed.leg.leg == Leg.PREFILL else Leg.AGGREGATED
        columns = fleet.columns
        role = columns.prefill if leg is Leg.PREFILL else columns.decode_or_both & ~columns.decode_only

        def most(allowed: BoolColumn) -> int:
            return max(chosen, int(overlap.max(where=allowed, initial=0)) * block_size)

        nearest = most(role)
        if nearest == chosen:
            return nearest
        takes = ready(fleet, leg, last_resort=True).allowed
        wanted = self._fleet.asks(request, whole=leg is Leg.AGGREGATED)
        asked = screen(wanted, fleet, leg).mask
        allowed = asked
        if leg is Leg.PREFILL:
            default = _router_default(placed.attempt)
            screens = screens_of(wanted, fleet, default, None)
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

    def _against_whom(
        self, placed: _Placed, best: BoolColumn, lost: int, chosen: Slot | None
    ) -> _ChosenAgainst:
        running, held = self._own.running, self._own.held
        slot = min(np.flatnonzero(best).tolist(), key=lambda each: (running[each], held[each]))
        has_more = chosen is not None and bool(running[slot] > running[chosen] or held[slot] > held[chosen])
        return _ChosenAgainst(placed.at_s, self._fleet.fleet.rank_at(Slot(slot)), lost, has_more)

    def _why_against(self, against: _ChosenAgainst) -> Cause:
        """The nearest request in time that went to the one that was not chosen says what the index knew."""
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

    def _facts(self) -> HitFacts:
        n = self._n
        rate = 0.0
        if self._tokens_by_quarter[3]:
            rate = self._first_seen_by_quarter[3] / self._tokens_by_quarter[3]
        warm_up = sum(
            max(0.0, self._first_seen_by_quarter[quarter] - rate * self._tokens_by_quarter[quarter])
            for quarter in range(3)
        )
        return HitFacts(
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
            workers_left=n["workers_left"],
            blocks_left=n["blocks_left"],
            fleet_blocks=self._fleet_blocks if self._sizes_known else None,
            workers_without_size=len(self._without_size),
        )


def _n_ranks(past: Past) -> int:
    """How many ranks there were, at any time."""
    seen = [*past.fleet.initial.values(), *(move.seen for move in past.fleet.moves)]
    sizes = {each.worker.worker: each.worker.dp_size for each in seen}
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
    """The router's own policy, as the constraint of a decision says it; workers' own go first."""
    enforcement, _, place = (attempt.constraint or "").partition(" ")
    level = place.partition("=")[0]
    if not level or enforcement not in ("required", "fallback"):
        return None
    policy = MismatchPolicy.FAIL if enforcement == "required" else MismatchPolicy.FALLBACK
    return RouterTopologyDefault(level, policy)
