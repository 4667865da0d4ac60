"""The pick among eligible slots: lowest cost, softmax over costs, round-robin or random."""

import msgspec
import numpy as np

from kvrouter._native import pick_lowest
from kvrouter.core.constraints import RouterConfigOverride, RouterMode
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import RequestId, Slot
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import FloatColumn, SlotColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.costs.leg import leg_costs
from kvrouter.kernel.routing.interface import (
    Costs,
    Pick,
    PickInput,
    RouteRequest,
    RoutingSettings,
    View,
    cost_rule,
)
from kvrouter.kernel.routing.masks import Mask
from kvrouter.kernel.topology.policy import TransferConstraint

_AGGREGATED, _PREFILL, _DECODE = Leg.AGGREGATED, Leg.PREFILL, Leg.DECODE
_KV = RouterMode.KV
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


class Rules(msgspec.Struct, frozen=True, gc=False):
    """The settings of one request's pick: the router's, with the request's override."""

    mode: RouterMode
    overlap_score_weight: float
    temperature: float


def rules_of(settings: RoutingSettings, override: RouterConfigOverride) -> Rules:
    """Return the rules for a request; the router's setting applies when the override is None."""
    mode, weight, temperature = (
        override.router_mode,
        override.overlap_score_weight,
        override.router_temperature,
    )
    return Rules(
        settings.mode if mode is None else mode,
        settings.overlap_score_weight if weight is None else weight,
        settings.temperature if temperature is None else temperature,
    )


def pick_at(slot: Slot, leg: Leg, fleet: Fleet, costs: Costs, candidates: int, *, unseen: int = 0) -> Pick:
    """Return the pick of ``slot``, with the parts of its cost."""
    rank = fleet.rank_at(slot)
    if rank is None:
        raise ValueError(f"slot {slot} is free")
    columns, overlap = costs.columns, costs.overlap_blocks
    transfer, multiplier, timed = costs.transfer_blocks, costs.multiplier, columns.timed
    overlap_blocks = 0 if overlap is None else overlap.item(slot)
    if timed is not None:
        at_slot = timed(slot, overlap_blocks)
        prefill_blocks, decode_blocks, times = at_slot.prefill_blocks, at_slot.decode_blocks, at_slot.times
    else:
        prefill, decode, times = columns.prefill_blocks, columns.decode_blocks, None
        prefill_blocks = 0.0 if prefill is None else prefill.item(slot)
        decode_blocks = 0.0 if decode is None else decode.item(slot)
    return Pick(
        slot=slot,
        rank=rank,
        leg=leg,
        overlap_blocks=overlap_blocks,
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        transfer_blocks=0.0 if transfer is None else transfer.item(slot),
        multiplier=1.0 if multiplier is None else multiplier.item(slot),
        cost=columns.cost.item(slot),
        candidates=candidates,
        unseen=unseen,
        times=times,
    )


_TOP = float(np.finfo(np.float64).max) / 4

UNSEEN_MAX = 64
"""The most unseen requests that one decision accounts for."""


def draw_unseen(expected: float, draw: int) -> int:
    """Return an assumed number of unseen requests, uniform from 0 to twice ``expected``, so that routers that
    decide at the same time decide differently.
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

    The lowest cost is determined after ``unseen`` requests were added one by one to the cheapest rank, each
    of which adds ``own_cost`` to it.
    """
    if rules.mode is _KV:
        if rules.temperature > 0.0:
            return _softmax(cost, in_rank_order(mask, fleet), rules.temperature, draw)
        allowed = None if mask.n_allowed == len(cost) else mask.allowed
        return pick_lowest(cost, allowed, fleet.columns.rank_hash, request_id, unseen, own_cost)
    eligible = in_rank_order(mask, fleet)
    at = turn if rules.mode is RouterMode.ROUND_ROBIN else mix64(draw)
    return Slot(int(eligible[at % len(eligible)]))


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


_SALT_OF = {_AGGREGATED: 0, _PREFILL: 1, _DECODE: 2}


class Picked(msgspec.Struct, frozen=True, gc=False):
    """A pick, with the costs that it is based on."""

    pick: Pick
    costs: Costs


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
    explain: bool = False,
) -> Picked:
    """Return the pick of one leg; ``prefill_slot`` is the source of a decode leg's KV. With ``explain`` slots
    that may not take the leg have costs too.
    """
    among = None if explain or mask.n_allowed == view.fleet.n_slots else mask.allowed
    costs = leg_costs(
        request, view, leg, rules.overlap_score_weight,
        constraint=constraint, prefill_slot=prefill_slot, among=among,
    )  # fmt: skip
    columns = costs.columns
    if view.rule is not None:
        draw, allowed = mix64(view.seed + _SALT_OF[leg]), in_rank_order(mask, view.fleet)
        slot = view.rule.pick(columns.cost, PickInput(request, leg, allowed, draw))
        return Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed), costs)
    slot, unseen = pick_by(columns.cost, request, view, leg, rules, mask, turn=turn)
    return Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed, unseen=unseen), costs)


def pick_by(
    cost: FloatColumn,
    request: RouteRequest,
    view: View,
    leg: Leg,
    rules: Rules,
    mask: Mask,
    *,
    turn: int = 0,
) -> tuple[Slot, int]:
    """Return the slot picked for a leg by ``cost``, and the number of unseen requests that were assumed.
    ``turn`` is for the mode round-robin.
    """
    draw, own_cost = mix64(view.seed + _SALT_OF[leg]), 0.0
    unseen = draw_unseen(view.unseen, draw) if view.unseen > 0.0 else 0
    if unseen:
        own_cost = cost_rule(view.settings.cost).own_cost(request, view, leg, rules.overlap_score_weight)
    slot = pick_slot(
        cost, mask, view.fleet, rules,
        request_id=request.request_id, draw=draw, turn=turn,
        unseen=unseen, own_cost=own_cost,
    )  # fmt: skip
    return slot, unseen
