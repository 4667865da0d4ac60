"""The pick among the slots that may take a leg: lowest cost, softmax over costs, in turn, or by chance."""

from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

import numpy as np

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import RequestId, Slot
from kvrouter.core.requests import Leg
from kvrouter.fleet import BoolColumn, Fleet, FloatColumn, SlotColumn, mix64
from kvrouter.routing.cost import Costs, Rules, leg_costs, own_cost, pick_at
from kvrouter.routing.eligibility import Mask, Screen, Step, first_refusals
from kvrouter.routing.explain import rows_of
from kvrouter.routing.request import Candidate, Pick, RouteRequest, View
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
            return _softmax(cost, in_rank_order(mask, fleet), rules.temperature, draw)
        if unseen:
            cost = _after(unseen, own_cost, cost, mask)
        return _lowest(cost, mask, fleet, request_id)
    eligible = in_rank_order(mask, fleet)
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


def in_rank_order(mask: Mask, fleet: Fleet) -> SlotColumn:
    """Return the slots of a mask in the order of their ranks."""
    order = fleet.rank_order
    return order[mask.allowed[order]]


_SALT_OF = {Leg.AGGREGATED: 0, Leg.PREFILL: 1, Leg.DECODE: 2}


class Picked(NamedTuple):
    """A pick, with the costs that it was made by."""

    pick: Pick
    costs: Costs


def able(who: Screen, not_busy: BoolColumn | None) -> Mask:
    """Return who may take the leg now."""
    return who.mask if not_busy is None else who.mask.within(not_busy)


def candidates(who: Screen, fleet: Fleet, later: Iterable[Step], picked: Picked) -> tuple[Candidate, ...]:
    """Return a row for every rank of the leg's role; ``later`` are the steps that follow the screen's own."""
    stopped = first_refusals(who, fleet, later)
    return rows_of(who, fleet, stopped, picked.costs, picked.pick.slot)


def pick_leg(
    request: RouteRequest,
    view: View,
    leg: Leg,
    rules: Rules,
    mask: Mask,
    *,
    turn: int,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
) -> Picked:
    """Return the pick of one leg; ``prefill_slot`` is where a decode leg's KV comes from."""
    costs = leg_costs(request, view, leg, rules, constraint=constraint, prefill_slot=prefill_slot)
    if view.rule is not None:
        draw = mix64(view.seed + _SALT_OF[leg])
        eligible = in_rank_order(mask, view.fleet)
        slot = view.rule.pick(request, view, leg, eligible, draw=draw, turn=turn)
        return Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed), costs)
    slot, unseen = pick_by(costs.cost, request, view, leg, rules, mask, turn=turn)
    return Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed, unseen=unseen), costs)


def pick_by(
    cost: FloatColumn, request: RouteRequest, view: View, leg: Leg, rules: Rules, mask: Mask, *, turn: int
) -> tuple[Slot, int]:
    """Return the slot that a leg is picked for by ``cost``, and how many unseen requests it has room for."""
    draw = mix64(view.seed + _SALT_OF[leg])
    unseen = draw_unseen(view.unseen, draw)
    slot = pick_slot(
        cost, mask, view.fleet, rules,
        request_id=request.request_id, draw=draw, turn=turn,
        unseen=unseen, own_cost=own_cost(request, view, leg, rules) if unseen else 0.0,
    )  # fmt: skip
    return slot, unseen
