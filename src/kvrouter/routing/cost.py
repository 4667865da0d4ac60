"""The cost of each candidate: named columns over slots, and links; lower is better.

Under the blocks rule it is in blocks::

    prefill_blocks  = (active prefill tokens + max(0, isl_tokens − overlap_blocks · block_size)) / block_size
    decode_blocks   = active blocks + the request's blocks that are not active there
    transfer_blocks = kv_transfer_weight · (latency_s + kv_bytes / bandwidth_bytes_per_s)
    cost            = (overlap_score_weight · prefill_blocks + decode_blocks + transfer_blocks) · multiplier
    multiplier      = exp(−tanh(sum of the weights of the preferred taints that the worker carries))

A prefill leg has no decode_blocks, and the decode leg of a pair no prefill_blocks; only that decode leg has
transfer_blocks. A column that would be the same nothing everywhere is None.

Under the time rule it is in seconds, by :mod:`kvrouter.routing.prediction`::

    cost = (overlap_score_weight · (queue_s + prefill_s) + memory_s + decode_s + others_s + turnover_s
            + transfer_s + price_s) · multiplier

and under LMetric a product, which a decode leg has without its first factor (Wang et al., arXiv 2603.15202;
the requests that run and this one, as in AIBrix's implementation)::

    cost = prefill_blocks · block_size · (requests + 1) · multiplier

Columns of blocks are there under every rule.

The pick among those that may take a leg is of the lowest cost, by softmax over costs, in turn, or by chance.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import exp, tanh
from typing import NamedTuple
from zlib import crc32

import numpy as np

from kvrouter.core.constraints import CostRule, PdSelection, RouterConfigOverride, RouterMode
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import RequestId, Slot, Taint
from kvrouter.core.requests import Leg
from kvrouter.fleet import BoolColumn, Fleet, FloatColumn, IntColumn, SlotColumn
from kvrouter.routing.eligibility import Mask, fitted
from kvrouter.routing.links import price_seconds, transfer_seconds
from kvrouter.routing.prediction import LegTimes, own_s
from kvrouter.routing.request import Pick, RouteRequest, RoutingSettings, Times, View
from kvrouter.topology import Preferred, TransferConstraint

_BLOCKS, _TIME, _LMETRIC = CostRule
_JOINT = PdSelection.JOINT
_AGGREGATED, _PREFILL, _DECODE = Leg.AGGREGATED, Leg.PREFILL, Leg.DECODE
"""An enumeration's attributes are slow before Python 3.12."""


class Rules(NamedTuple):
    """How this one request is picked for: the settings with its override."""

    mode: RouterMode
    overlap_score_weight: float
    temperature: float


def rules_of(settings: RoutingSettings, override: RouterConfigOverride) -> Rules:
    """Return the rules for a request; what its override leaves None is the router's."""
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


class Timed(NamedTuple):
    """What the time rule says of one slot."""

    prefill_blocks: float
    decode_blocks: float
    times: Times


class Costs(NamedTuple):
    """The columns of one leg, each with an entry per slot, eligible or not. Under the time rule those of
    blocks to prefill and to decode are not made: ``timed`` has them, and the times, of a slot that holds so
    many leading blocks.
    """

    overlap_blocks: IntColumn | None
    prefill_blocks: FloatColumn | None
    decode_blocks: FloatColumn | None
    transfer_blocks: FloatColumn | None
    multiplier: FloatColumn | None
    cost: FloatColumn
    timed: Callable[[Slot, int], Timed] | None = None


def leg_costs(
    request: RouteRequest,
    view: View,
    leg: Leg,
    rules: Rules,
    *,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
    stalls: bool = False,
    among: BoolColumn | None = None,
) -> Costs:
    """Return the cost columns of one leg; ``prefill_slot`` is where a decode leg's KV comes from. ``stalls``:
    it is for decode workers that prefill for themselves; decode legs stall by that where pairs are chosen
    together. By the time rule only slots ``among`` these have a cost, and the others infinity.
    """
    settings, n_slots = view.settings, view.fleet.n_slots
    stalls = stalls or (settings.pd_selection is _JOINT and leg is _DECODE)
    overlap = overlap_of(view)
    transfer = transfer_s = None
    if prefill_slot is not None and settings.links is not None:
        transfer_s = transfer_seconds(request, view, overlap, prefill_slot)
        if transfer_s is not None and settings.kv_transfer_weight > 0.0:
            with np.errstate(over="ignore"):
                transfer = transfer_s * settings.kv_transfer_weight
    multiplier = multiplier_of(view.fleet, preferred_taints(request, leg, constraint))
    weight = rules.overlap_score_weight
    rule = settings.cost
    if rule is _TIME:
        times = LegTimes(request, view, leg, overlap, overlap_score_weight=weight, stalls=stalls)
        cost = times.costs(n_slots, among)
        price_s = None
        if transfer_s is not None and prefill_slot is not None:
            cost += transfer_s
            price_s = price_seconds(request, view, overlap, prefill_slot)
            if price_s is not None:
                cost += price_s
        if multiplier is not None:
            cost *= multiplier
        timed = partial(_timed, request, view, leg, times, transfer_s, price_s)
        return Costs(overlap, None, None, transfer, multiplier, cost, timed)
    prefill = decode = None
    if leg is not _DECODE and settings.track_prefill_tokens:
        prefill = _prefill_blocks(request, view, overlap)
    if leg is not _PREFILL and settings.track_active_blocks:
        decode = _decode_blocks(request, view)
    cost = _lmetric(prefill, view) if rule is _LMETRIC else _total(prefill, decode, transfer, weight, n_slots)
    if multiplier is not None:
        cost *= multiplier
    return Costs(overlap, prefill, decode, transfer, multiplier, cost)


def own_cost(request: RouteRequest, view: View, leg: Leg, rules: Rules) -> float:
    """Return what the leg of such a request adds to the cost of a rank that holds nothing of it."""
    if view.settings.cost is _TIME:
        return own_s(request, view, leg)
    blocks = 0.0
    if leg is not _DECODE and view.settings.track_prefill_tokens:
        weight = rules.overlap_score_weight if view.settings.cost is _BLOCKS else 1.0
        blocks += weight * request.isl_tokens / view.fleet.block_size
    if view.settings.cost is _LMETRIC:
        return blocks * view.fleet.block_size or 1.0
    if leg is not _PREFILL and view.settings.track_active_blocks:
        blocks += request.total_blocks
    return blocks


def _lmetric(prefill: FloatColumn | None, view: View) -> FloatColumn:
    n_slots = view.fleet.n_slots
    batch: FloatColumn = np.ones(n_slots)
    if view.cost_input is not None:
        batch += fitted(view.cost_input.requests, n_slots)
    if prefill is None:
        return batch
    # at least 1, so that requests count where nothing of a prompt is known, or all of it is cached
    tokens: FloatColumn = np.maximum(prefill * float(view.fleet.block_size), 1.0)
    tokens *= batch
    return tokens


def overlap_of(view: View) -> IntColumn | None:
    """Return the leading blocks of the request that each slot holds."""
    return None if view.overlap_blocks is None else fitted(view.overlap_blocks, view.fleet.n_slots)


def _prefill_blocks(request: RouteRequest, view: View, overlap: IntColumn | None) -> FloatColumn:
    block_size = float(view.fleet.block_size)
    active = fitted(view.prefill_tokens, view.fleet.n_slots)
    if overlap is None:
        tokens = np.add(active, float(request.isl_tokens))
    else:
        tokens = np.multiply(overlap, -block_size)
        tokens += float(request.isl_tokens)
        np.maximum(tokens, 0.0, out=tokens)
        tokens += active
    tokens /= block_size
    return tokens


def _decode_blocks(request: RouteRequest, view: View) -> FloatColumn:
    n_slots = view.fleet.n_slots
    active = fitted(view.active_blocks, n_slots)
    if view.not_active is None:
        return np.add(active, float(request.total_blocks))
    return np.add(active, fitted(view.not_active, n_slots), dtype=np.float64)


def _timed(
    request: RouteRequest,
    view: View,
    leg: Leg,
    times: LegTimes,
    transfer_s: FloatColumn | None,
    price_s: FloatColumn | None,
    slot: Slot,
    overlap_blocks: int,
) -> Timed:
    at = times.at(
        slot,
        transfer_s=0.0 if transfer_s is None else transfer_s.item(slot),
        price_s=0.0 if price_s is None else price_s.item(slot),
    )
    return timed_at(request, view, leg, slot, overlap_blocks, at)


def timed_at(
    request: RouteRequest, view: View, leg: Leg, slot: Slot, overlap_blocks: int, times: Times
) -> Timed:
    """Return the times of a leg at a slot, with its blocks to prefill and to decode there."""
    block_size = view.fleet.block_size
    prefill = decode = 0.0
    if leg is not _DECODE and view.settings.track_prefill_tokens:
        uncached = max(0, request.isl_tokens - overlap_blocks * block_size)
        prefill = (uncached + view.prefill_tokens.item(slot)) / block_size
    if leg is not _PREFILL and view.settings.track_active_blocks:
        new = request.total_blocks if view.not_active is None else view.not_active.item(slot)
        decode = float(view.active_blocks.item(slot) + new)
    return Timed(prefill, decode, times)


def _total(
    prefill: FloatColumn | None,
    decode: FloatColumn | None,
    transfer: FloatColumn | None,
    overlap_score_weight: float,
    n_slots: int,
) -> FloatColumn:
    if prefill is None:
        cost = np.zeros(n_slots) if decode is None else decode.copy()
    elif overlap_score_weight == 1.0:
        cost = prefill.copy() if decode is None else prefill + decode
    else:
        with np.errstate(over="ignore"):  # an infinite cost is a cost like any other
            cost = prefill * overlap_score_weight
        if decode is not None:
            cost += decode
    if transfer is not None:
        cost += transfer
    return cost


def preferred_taints(
    request: RouteRequest, leg: Leg, constraint: TransferConstraint | None
) -> Mapping[Taint, float]:
    """Return the weights of the taints that make a rank cheaper or dearer for this leg."""
    pin = request.prefill_pin if leg is _PREFILL else request.pin
    if pin is not None:
        return {}
    weights = request.constraints.preferred_taints
    near = request.near
    if near is not None and leg is not _DECODE and not near.is_required and near.taint is not None:
        weights = {**weights, near.taint: near.weight}
    if constraint is not None and isinstance(constraint.policy, Preferred) and constraint.taint is not None:
        return {**weights, constraint.taint: constraint.policy.weight}
    return weights


def multiplier_of(
    fleet: Fleet, weights: Mapping[Taint, float], *, everywhere: float = 0.0
) -> FloatColumn | None:
    """Return the multiplier of each slot by the taints that it carries; ``everywhere`` adds a weight to all.
    None where it is 1.
    """
    if not weights and not everywhere:
        return None
    sums = np.zeros(fleet.n_slots)
    with np.errstate(over="ignore"):  # tanh of an infinite sum is 1
        for taint in sorted(weights):
            sums += fleet.carries(taint) * weights[taint]
        sums += everywhere
    # The few distinct sums go through math and not numpy, whose last bits depend on the machine.
    distinct = {*weights.values()} if len(weights) == 1 and not everywhere else {*sums.tolist()}
    multiplier = np.ones(fleet.n_slots)
    for weight in distinct - {0.0}:
        multiplier[sums == weight] = exp(-tanh(weight))
    return multiplier


def pick_at(slot: Slot, leg: Leg, fleet: Fleet, costs: Costs, candidates: int, *, unseen: int = 0) -> Pick:
    """Return the pick of ``slot``."""
    rank = fleet.rank_at(slot)
    if rank is None:
        raise ValueError(f"slot {slot} is free")
    overlap, prefill, decode, transfer, multiplier, cost, timed = costs
    overlap_blocks = 0 if overlap is None else overlap.item(slot)
    if timed is not None:
        prefill_blocks, decode_blocks, times = timed(slot, overlap_blocks)
    else:
        prefill_blocks = 0.0 if prefill is None else prefill.item(slot)
        decode_blocks = 0.0 if decode is None else decode.item(slot)
        times = None
    return Pick(
        slot=slot,
        rank=rank,
        leg=leg,
        overlap_blocks=overlap_blocks,
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        transfer_blocks=0.0 if transfer is None else transfer.item(slot),
        multiplier=1.0 if multiplier is None else multiplier.item(slot),
        cost=cost.item(slot),
        candidates=candidates,
        unseen=unseen,
        times=times,
    )


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
    is_masked: bool = False,
) -> Slot:
    """Return the slot that ``rules`` pick; ``mask`` allows at least one. ``draw`` is 64 random bits.
    ``is_masked``: where the mask refuses a slot its cost is infinite already.

    The lowest cost is what it would be after ``unseen`` requests went where they are cheapest, one by one,
    each of which adds ``own_cost`` to its rank.
    """
    if rules.mode is RouterMode.KV:
        if rules.temperature > 0.0:
            return _softmax(cost, in_rank_order(mask, fleet), rules.temperature, draw)
        if unseen:
            cost = _after(unseen, own_cost, cost, mask)
        return _lowest(cost, mask, fleet, request_id, is_masked=is_masked)
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


def _lowest(cost: FloatColumn, mask: Mask, fleet: Fleet, request_id: RequestId, *, is_masked: bool) -> Slot:
    open_cost = cost
    if mask.n_allowed != len(cost) and not is_masked:
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


_SALT_OF = {_AGGREGATED: 0, _PREFILL: 1, _DECODE: 2}


class Picked(NamedTuple):
    """A pick, with the costs that it was made by."""

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
    """Return the pick of one leg; ``prefill_slot`` is where a decode leg's KV comes from. To ``explain`` it
    slots that may not take it have costs too.
    """
    among = None if explain or mask.n_allowed == view.fleet.n_slots else mask.allowed
    costs = leg_costs(
        request, view, leg, rules, constraint=constraint, prefill_slot=prefill_slot, among=among
    )
    if view.rule is not None:
        draw = mix64(view.seed + _SALT_OF[leg])
        eligible = in_rank_order(mask, view.fleet)
        slot = view.rule.pick(request, view, leg, eligible, draw=draw, turn=turn)
        return Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed), costs)
    is_masked = among is not None and view.settings.cost is _TIME
    slot, unseen = pick_by(costs.cost, request, view, leg, rules, mask, turn=turn, is_masked=is_masked)
    return Picked(pick_at(slot, leg, view.fleet, costs, mask.n_allowed, unseen=unseen), costs)


def pick_by(
    cost: FloatColumn,
    request: RouteRequest,
    view: View,
    leg: Leg,
    rules: Rules,
    mask: Mask,
    *,
    turn: int,
    is_masked: bool = False,
) -> tuple[Slot, int]:
    """Return the slot that a leg is picked for by ``cost``, and how many unseen requests it has room for."""
    draw = mix64(view.seed + _SALT_OF[leg])
    unseen = draw_unseen(view.unseen, draw)
    slot = pick_slot(
        cost, mask, view.fleet, rules,
        request_id=request.request_id, draw=draw, turn=turn,
        unseen=unseen, own_cost=own_cost(request, view, leg, rules) if unseen else 0.0, is_masked=is_masked,
    )  # fmt: skip
    return slot, unseen
