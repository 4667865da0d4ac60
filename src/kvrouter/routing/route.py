"""The decision: one request and one view in, one decision or one refusal out; nothing is changed.

The whole of it is made before anything is sent, so that a request whose KV may not leave its domain is
refused while it has cost nothing.

Workers whose circuit is open are passed over. Where nobody else may take a request they are its last resort:
a worker that may be well again is better than a refusal. One that is only busy is somebody else.
"""

from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

import numpy as np
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import RequestId, Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.fleet import BoolColumn, Fleet, FloatColumn, SlotColumn, mix64
from kvrouter.routing.cost import Costs, Rules, leg_costs, own_cost, pick_at, rules_of
from kvrouter.routing.eligibility import Mask, Screen, Step, first_refusals, not_busy, ready, screen
from kvrouter.routing.explain import (
    busy_steps,
    decode_steps,
    handoff_steps,
    has_legal_decode,
    prefill_steps,
    refuse_leg,
    refuse_pair,
    rows_of,
)
from kvrouter.routing.pair import (
    constraint_of,
    decode_mask,
    knows_its_place,
    prefill_mask,
    reached_decode_mask,
    reaching,
    screens_of,
    shares_domain,
    tiers_of,
)
from kvrouter.routing.request import Candidate, Decision, Pick, RouteRequest, View
from kvrouter.topology import TransferConstraint

_TOP = float(np.finfo(np.float64).max) / 4

UNSEEN_MAX = 64
"""How many unseen requests one decision makes room for."""


def draw_unseen(expected: float, draw: int) -> int:
    """Return how many requests to take for placed and unseen, when ``expected`` are: any number up to twice
    that is as likely, so that routers that decide at the same time decide differently.
    """
    if expected <= 0.0:
        return 0
    share = (mix64(draw ^ _UNSEEN_SALT) >> 11) * 2.0**-53
    return min(UNSEEN_MAX, int(share * (2.0 * expected + 1.0)))


_UNSEEN_SALT = 0x9E3779B97F4A7C15


def pick_slot(
    cost: FloatColumn,
    mask: Mask,
    fleet: Fleet,
    rules: Rules,
    *,
    request_id: RequestId,
    draw: int,
    turn: int,
    unseen: int = 0,
    own_cost: float = 0.0,
) -> Slot:
    """Return the slot that ``rules`` pick; ``mask`` allows at least one. ``draw`` is 64 random bits.

    The lowest cost is what it would be after ``unseen`` requests went where they are cheapest, one by one,
    each of which adds ``own_cost`` to its rank.
    """
    if rules.mode is RouterMode.KV:
        if rules.temperature > 0.0:
            return _softmax(cost, _in_rank_order(mask, fleet), rules.temperature, draw)
        if unseen:
            cost = _after(unseen, own_cost, cost, mask)
        return _lowest(cost, mask, fleet, request_id)
    eligible = _in_rank_order(mask, fleet)
    at = turn if rules.mode is RouterMode.ROUND_ROBIN else mix64(draw)
    return Slot(int(eligible[at % len(eligible)]))


def _after(unseen: int, own_cost: float, cost: FloatColumn, mask: Mask) -> FloatColumn:
    """Return the costs after so many requests went where they are cheapest."""
    cost = cost.copy()
    np.putmask(cost, mask.refused, np.inf)
    for _ in range(unseen):
        cost[cost.argmin()] += own_cost
    return cost


def _lowest(cost: FloatColumn, mask: Mask, fleet: Fleet, request_id: RequestId) -> Slot:
    open_cost = cost
    if mask.n_allowed != len(cost):
        open_cost = cost.copy()
        np.putmask(open_cost, mask.refused, np.inf)
    at = int(open_cost.argmin())
    best = open_cost.item(at)
    tied = open_cost == best
    if best == np.inf:  # a cost that overflowed looks like a refusal
        tied &= mask.allowed
    if np.count_nonzero(tied) == 1:
        return Slot(int(tied.argmax()))
    slots = np.flatnonzero(tied)
    return Slot(int(slots[_spread(fleet, slots, request_id).argmin()]))


def _spread(
    fleet: Fleet, slots: SlotColumn, request_id: RequestId
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return 64 bits per slot, from the request id and the worker rank alone."""
    bits = fleet.columns.rank_hash[slots] ^ np.uint64(mix64(crc32(request_id.encode())))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    bits *= np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(29))


def _softmax(cost: FloatColumn, eligible: SlotColumn, temperature: float, draw: int) -> Slot:
    """Draw with p ∝ exp(−(cost − min) / ((max − min) · temperature)); uniform when all costs are equal."""
    costs = cost[eligible].clip(-_TOP, _TOP)
    lowest = costs.min()
    spread = costs.max() - lowest
    shares = np.ones(len(costs))
    if spread > 0.0:
        with np.errstate(over="ignore", under="ignore"):
            shares = np.exp(-((costs - lowest) / spread) / temperature)
    reached = np.cumsum(shares)
    aim = (mix64(draw) >> 11) * 2.0**-53 * reached[-1]
    at = min(int(np.searchsorted(reached, aim, side="right")), len(eligible) - 1)
    return Slot(int(eligible[at]))


def _in_rank_order(mask: Mask, fleet: Fleet) -> SlotColumn:
    order = fleet.rank_order
    return order[mask.allowed[order]]


_SALT_OF = {Leg.AGGREGATED: 0, Leg.PREFILL: 1, Leg.DECODE: 2}


class _Picked(NamedTuple):
    pick: Pick
    costs: Costs


def route(request: RouteRequest, view: View, *, explain: bool = False) -> Decision:
    """Decide where ``request`` goes: to a pair of ranks, or to one when no prefill worker is there or the
    request asks for one, or when prefill is all that is decided here.

    Raises NoEligibleWorker when nobody may take it, AllWorkersBusy when somebody could and everybody who
    could is busy; both count the ranks of the leg that they name by reason. With ``explain`` they carry the
    rows of every leg, as a decision does; those of the named leg are the ones that were counted.
    """
    try:
        return _route(request, view, explain=explain)
    except NoEligibleWorker:
        widened = _last_resort(request, view.fleet)
        if widened is None:
            raise
    return _route(widened, view, explain=explain)


def route_decode(
    request: RouteRequest,
    view: View,
    constraint: TransferConstraint | None,
    *,
    prefill: WorkerRank | None = None,
    explain: bool = False,
) -> Decision:
    """Pick the decode rank again for a request whose prefill is done, under the constraint of its decision.

    ``prefill`` is where its KV waits, which counts only with a link table. Raises what :func:`route` raises.
    """
    try:
        return _route_decode(request, view, constraint, prefill=prefill, explain=explain)
    except NoEligibleWorker:
        widened = _last_resort(request, view.fleet)
        if widened is None:
            raise
    return _route_decode(widened, view, constraint, prefill=prefill, explain=explain)


def _last_resort(request: RouteRequest, fleet: Fleet) -> RouteRequest | None:
    """What to ask for when nobody may take ``request``: also those whose circuit is open. None where there
    are none.
    """
    if request.last_resort or not fleet.has_open_circuits:
        return None
    return structs.replace(request, last_resort=True)


def _route(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    if view.settings.prefill_alone:
        return _route_prefill(request, view, explain=explain)
    prefill = ready(view.fleet, Leg.PREFILL, last_resort=request.last_resort)
    if request.prefill_pin is not None or (prefill.n_allowed and not request.whole):
        pair = _route_pair(request, view, explain=explain)
        return _instead_of_broken_pair(request, view, pair, explain=explain) or pair
    return _route_whole(request, view, explain=explain)


def _instead_of_broken_pair(
    request: RouteRequest, view: View, pair: Decision, *, explain: bool
) -> Decision | None:
    """One worker for all of the request, where the pair's KV was lost lately, as that of every pair which
    could be made; None where the pair is the better try.
    """
    fleet, prefill = view.fleet, pair.prefill
    if (
        not fleet.broken_pairs
        or not request.whole_if_broken
        or request.prefill_pin is not None
        or prefill is None
    ):
        return None
    unreached = fleet.unreached_from(prefill.slot)
    if unreached is None or not unreached[pair.decode.slot] or fleet.broken_pairs.whole_failed:
        return None
    try:
        whole = _route_whole(request, view, explain=explain)
    except RoutingRefused:
        return None
    left_out = tuple(
        structs.replace(row, refused=row.refused or Reason.KV_LOST, picked=False)
        for row in pair.rows
        if row.leg is Leg.PREFILL
    )
    return structs.replace(whole, rows=left_out + whole.rows)


def _route_decode(
    request: RouteRequest,
    view: View,
    constraint: TransferConstraint | None,
    *,
    prefill: WorkerRank | None,
    explain: bool,
) -> Decision:
    fleet = view.fleet
    who, free = screen(request, fleet, Leg.DECODE), not_busy(view)
    able = _able(who, free)
    sender = None if prefill is None else fleet.slot_of(prefill)
    if sender is None:
        chosen = decode_mask(able, fleet, constraint)
    else:
        chosen = reached_decode_mask(able, fleet, constraint, sender)
    if not chosen.mask.n_allowed:
        raise refuse_leg(
            request, view, who, free, constraint=constraint, prefill_slot=sender, explain=explain
        )
    rules = rules_of(view.settings, request.override)
    decode = _pick(
        request, view, Leg.DECODE, rules, chosen.mask,
        turn=view.turn, constraint=constraint, prefill_slot=sender,
    )  # fmt: skip
    rows: tuple[Candidate, ...] = ()
    if explain:
        steps = () if chosen.fallback_used else decode_steps(fleet, constraint)
        rows = _rows(who, fleet, (*steps, *handoff_steps(chosen.reached), *busy_steps(free)), decode)
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=decode.pick,
        constraint=constraint,
        fallback_used=chosen.fallback_used,
        cross_domain=_crosses(fleet, constraint, decode.pick.slot),
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_whole(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    fleet = view.fleet
    who, free = screen(request, fleet, Leg.AGGREGATED), not_busy(view)
    mask = _able(who, free)
    if not mask.n_allowed:
        raise refuse_leg(request, view, who, free, explain=explain)
    rules = rules_of(view.settings, request.override)
    whole = _pick(request, view, Leg.AGGREGATED, rules, mask, turn=view.turn)
    rows = _rows(who, fleet, busy_steps(free), whole) if explain else ()
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=whole.pick,
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_prefill(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    """Pick for prefill, and return the constraint on the decode pick.

    A worker whose KV must stay in a domain that it does not know is not picked: nobody could obey it.
    """
    fleet, router_default = view.fleet, view.settings.topology_default
    who, free = screen(request, fleet, Leg.PREFILL), not_busy(view)
    placed = knows_its_place(fleet, router_default)
    if not placed.all():
        steps = (*who.steps, Step(Reason.DOMAIN_UNKNOWN, placed))
        who = who._replace(steps=steps, mask=who.mask.within(placed))
    mask = _able(who, free)
    if not mask.n_allowed:
        raise refuse_leg(request, view, who, free, explain=explain)
    rules = rules_of(view.settings, request.override)
    prefill = _pick(request, view, Leg.PREFILL, rules, mask, turn=view.turn)
    rows = _rows(who, fleet, busy_steps(free), prefill) if explain else ()
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=prefill.pick,
        constraint=constraint_of(fleet, prefill.pick.slot, router_default),
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_pair(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    fleet, router_default = view.fleet, view.settings.topology_default
    free = not_busy(view)
    screens = screens_of(request, fleet, router_default, free)
    able = _able(screens.decode, free)
    senders = prefill_mask(screens, fleet, able, router_default)
    if not senders.n_allowed:
        raise refuse_pair(request, view, screens, explain=explain)
    reach = reaching(senders, fleet, able, router_default)
    if reach is not None:
        senders = senders.within(reach)
    rules = rules_of(view.settings, request.override)
    prefill = _pick(request, view, Leg.PREFILL, rules, senders, turn=view.turn)
    constraint = constraint_of(fleet, prefill.pick.slot, router_default)
    chosen = reached_decode_mask(able, fleet, constraint, prefill.pick.slot)
    decode = _pick(
        request, view, Leg.DECODE, rules, chosen.mask,
        turn=view.turn // senders.n_allowed,  # or each prefill rank would always meet the same decode rank
        constraint=constraint, prefill_slot=prefill.pick.slot,
    )  # fmt: skip
    rows: tuple[Candidate, ...] = ()
    if explain:
        tiers = tiers_of(screens.groups, fleet, able)
        passed = tiers.home if (senders.allowed & tiers.home).any() else has_legal_decode(tiers)
        near = () if chosen.fallback_used else decode_steps(fleet, constraint)
        far = prefill_steps(fleet, screens.groups, passed)
        far, near = (*far, *handoff_steps(reach)), (*near, *handoff_steps(chosen.reached))
        rows = _rows(screens.prefill, fleet, (*far, *busy_steps(free)), prefill)
        rows += _rows(screens.decode, fleet, (*near, *busy_steps(free)), decode)
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=decode.pick,
        prefill=prefill.pick,
        constraint=constraint,
        fallback_used=chosen.fallback_used,
        cross_domain=_crosses(fleet, constraint, decode.pick.slot),
        last_resort=request.last_resort,
        rows=rows,
    )


def _able(who: Screen, not_busy: BoolColumn | None) -> Mask:
    """Who may take the leg now."""
    return who.mask if not_busy is None else who.mask.within(not_busy)


def _rows(who: Screen, fleet: Fleet, later: Iterable[Step], picked: _Picked) -> tuple[Candidate, ...]:
    """A row for every rank of the leg's role; ``later`` are the steps that follow the screen's own."""
    stopped = first_refusals(who, fleet, later)
    return rows_of(who, fleet, stopped, picked.costs, picked.pick.slot)


def _pick(
    request: RouteRequest,
    view: View,
    leg: Leg,
    rules: Rules,
    mask: Mask,
    *,
    turn: int,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
) -> _Picked:
    costs = leg_costs(request, view, leg, rules, constraint=constraint, prefill_slot=prefill_slot)
    draw = mix64(view.seed + _SALT_OF[leg])
    if view.rule is not None:
        eligible = _in_rank_order(mask, view.fleet)
        slot = view.rule.pick(request, view, leg, eligible, draw=draw, turn=turn)
        return _Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed), costs)
    unseen = draw_unseen(view.unseen, draw)
    slot = pick_slot(
        costs.cost, mask, view.fleet, rules,
        request_id=request.request_id, draw=draw, turn=turn,
        unseen=unseen, own_cost=own_cost(request, view, leg, rules) if unseen else 0.0,
    )  # fmt: skip
    return _Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed, unseen=unseen), costs)


def _crosses(fleet: Fleet, constraint: TransferConstraint | None, decode: Slot) -> bool:
    return constraint is not None and not shares_domain(fleet, constraint)[decode]
