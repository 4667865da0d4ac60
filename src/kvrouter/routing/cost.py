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
            + transfer_s) · multiplier

and under LMetric a product, which a decode leg has without its first factor (Wang et al., arXiv 2603.15202;
the requests that run and this one, as in AIBrix's implementation)::

    cost = prefill_blocks · block_size · (requests + 1) · multiplier

Columns of blocks are there under every rule.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import exp, tanh
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouter.core.constraints import CostRule, RouterConfigOverride, RouterMode
from kvrouter.core.ids import Slot, Taint
from kvrouter.core.requests import Leg
from kvrouter.fleet import UNKNOWN_VALUE, Fleet, FloatColumn, IntColumn
from kvrouter.routing.eligibility import fitted
from kvrouter.routing.prediction import LegTimes, own_s
from kvrouter.routing.request import Pick, RouteRequest, RoutingSettings, View
from kvrouter.topology import Link, LinkTable, Preferred, TransferConstraint


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


def transfer_seconds(
    request: RouteRequest, view: View, overlap: IntColumn | None, prefill_slot: Slot
) -> FloatColumn | None:
    """Return how long moving the KV from ``prefill_slot`` takes; None where the links are not weighed.

    kv_bytes = (isl_tokens − tokens cached on the decode worker) · kv_bytes_per_token of the prefill worker.
    Where that worker does not publish it, the latency alone counts.
    """
    settings, fleet = view.settings, view.fleet
    if settings.links is None or (settings.kv_transfer_weight == 0.0 and settings.cost is not CostRule.TIME):
        return None
    links, which = links_from(fleet, settings.links, prefill_slot)
    latency_s = np.array([link.latency_s for link in links])[which]
    bandwidth_bytes_per_s = np.array([link.bandwidth_bytes_per_s for link in links])[which]
    tokens = np.full(fleet.n_slots, float(request.isl_tokens))
    if overlap is not None:
        tokens -= overlap * float(fleet.block_size)
        np.maximum(tokens, 0.0, out=tokens)
    bytes_per_token = max(0, int(fleet.columns.kv_bytes_per_token[prefill_slot]))
    with np.errstate(over="ignore"):
        transfer_s: FloatColumn = latency_s + tokens * bytes_per_token / bandwidth_bytes_per_s
    return transfer_s


def links_from(fleet: Fleet, table: LinkTable, prefill_slot: Slot) -> tuple[list[Link], npt.NDArray[np.intp]]:
    """Return the links, and per slot which of them leads there from ``prefill_slot``.

    The same link as ``table.link`` gives for the two workers' domain values, by the prefill worker's levels.
    """
    card = fleet.card_at(prefill_slot)
    levels = () if card is None else tuple(level.strip() for level in card.runtime_config.topology_levels)
    links = [table.otherwise]
    which = np.zeros(fleet.n_slots, np.intp)
    together = np.ones(fleet.n_slots, np.bool_)
    at = 0
    for level in levels:
        if level in table.by_level:
            links.append(table.by_level[level])
            at = len(links) - 1
        ids = fleet.domain_ids(level)
        own = int(ids[prefill_slot])
        if own == UNKNOWN_VALUE:
            continue
        together &= (ids == own) | (ids == UNKNOWN_VALUE)
        which[together & (ids == own)] = at
    for (domain, one, other), link in reversed(tuple(table.pairs.items())):
        here = fleet.domain_value_at(domain, prefill_slot)
        for value, far in ((one, other), (other, one)):
            far_id = fleet.domain_value_id(domain, far)
            if here == value and far_id is not None:
                links.append(link)
                which[fleet.domain_ids(domain) == far_id] = len(links) - 1
    return links, which


class Costs(NamedTuple):
    """The columns of one leg, each with an entry per slot, eligible or not. Under the time rule those of
    blocks to prefill and to decode are not made: ``blocks_at`` has them of one slot.
    """

    overlap_blocks: IntColumn | None
    prefill_blocks: FloatColumn | None
    decode_blocks: FloatColumn | None
    transfer_blocks: FloatColumn | None
    multiplier: FloatColumn | None
    cost: FloatColumn
    times: LegTimes | None = None
    blocks_at: Callable[[Slot], tuple[float, float]] | None = None


def leg_costs(
    request: RouteRequest,
    view: View,
    leg: Leg,
    rules: Rules,
    *,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
) -> Costs:
    """Return the cost columns of one leg; ``prefill_slot`` is where a decode leg's KV comes from."""
    settings, n_slots = view.settings, view.fleet.n_slots
    overlap = None if view.overlap_blocks is None else fitted(view.overlap_blocks, n_slots)
    transfer = transfer_s = None
    if prefill_slot is not None:
        transfer_s = transfer_seconds(request, view, overlap, prefill_slot)
    if transfer_s is not None and settings.kv_transfer_weight > 0.0:
        with np.errstate(over="ignore"):
            transfer = transfer_s * settings.kv_transfer_weight
    multiplier = _multiplier(view.fleet, _preferred_taints(request, leg, constraint))
    weight = rules.overlap_score_weight
    if settings.cost is CostRule.TIME:
        times = LegTimes(request, view, leg, overlap, transfer_s, overlap_score_weight=weight)
        cost, blocks_at = times.cost, partial(_blocks_at, request, view, leg, overlap)
        if multiplier is not None:
            cost = cost * multiplier
        return Costs(overlap, None, None, transfer, multiplier, cost, times, blocks_at)
    prefill = decode = None
    if leg is not Leg.DECODE and settings.track_prefill_tokens:
        prefill = _prefill_blocks(request, view, overlap)
    if leg is not Leg.PREFILL and settings.track_active_blocks:
        decode = _decode_blocks(request, view)
    if settings.cost is CostRule.LMETRIC:
        cost = _lmetric(prefill, view)
    else:
        cost = _total(prefill, decode, transfer, weight, n_slots)
    if multiplier is not None:
        cost *= multiplier
    return Costs(overlap, prefill, decode, transfer, multiplier, cost)


def own_cost(request: RouteRequest, view: View, leg: Leg, rules: Rules) -> float:
    """Return what the leg of such a request adds to the cost of a rank that holds nothing of it."""
    if view.settings.cost is CostRule.TIME:
        return own_s(request, view, leg)
    blocks = 0.0
    if leg is not Leg.DECODE and view.settings.track_prefill_tokens:
        weight = rules.overlap_score_weight if view.settings.cost is CostRule.BLOCKS else 1.0
        blocks += weight * request.isl_tokens / view.fleet.block_size
    if view.settings.cost is CostRule.LMETRIC:
        return blocks * view.fleet.block_size or 1.0
    if leg is not Leg.PREFILL and view.settings.track_active_blocks:
        blocks += request.total_blocks
    return blocks


def _lmetric(prefill: FloatColumn | None, view: View) -> FloatColumn:
    n_slots = view.fleet.n_slots
    batch: FloatColumn = np.ones(n_slots)
    if view.requests is not None:
        batch += fitted(view.requests, n_slots)
    if prefill is None:
        return batch
    tokens: FloatColumn = prefill * float(view.fleet.block_size)
    tokens *= batch
    return tokens


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


def _blocks_at(
    request: RouteRequest, view: View, leg: Leg, overlap: IntColumn | None, slot: Slot
) -> tuple[float, float]:
    """Return one slot's blocks to prefill and to decode."""
    prefill = decode = 0.0
    if leg is not Leg.DECODE and view.settings.track_prefill_tokens:
        cached = 0 if overlap is None else overlap.item(slot) * view.fleet.block_size
        prefill = (
            max(0, request.isl_tokens - cached) + view.prefill_tokens.item(slot)
        ) / view.fleet.block_size
    if leg is not Leg.PREFILL and view.settings.track_active_blocks:
        new = request.total_blocks if view.not_active is None else view.not_active.item(slot)
        decode = float(view.active_blocks.item(slot) + new)
    return prefill, decode


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


def _preferred_taints(
    request: RouteRequest, leg: Leg, constraint: TransferConstraint | None
) -> Mapping[Taint, float]:
    pin = request.prefill_pin if leg is Leg.PREFILL else request.pin
    if pin is not None:
        return {}
    weights = request.constraints.preferred_taints
    if constraint is not None and isinstance(constraint.policy, Preferred) and constraint.taint is not None:
        return {**weights, constraint.taint: constraint.policy.weight}
    return weights


def _multiplier(fleet: Fleet, weights: Mapping[Taint, float]) -> FloatColumn | None:
    if not weights:
        return None
    sums = np.zeros(fleet.n_slots)
    with np.errstate(over="ignore"):  # tanh of an infinite sum is 1
        for taint in sorted(weights):
            sums += fleet.carries(taint) * weights[taint]
    # The few distinct sums go through math and not numpy, whose last bits depend on the machine.
    distinct = {*weights.values()} if len(weights) == 1 else {*sums.tolist()}
    multiplier = np.ones(fleet.n_slots)
    for weight in distinct - {0.0}:
        multiplier[sums == weight] = exp(-tanh(weight))
    return multiplier


def pick_at(slot: Slot, leg: Leg, fleet: Fleet, costs: Costs, candidates: int, *, unseen: int = 0) -> Pick:
    """Return the pick of ``slot``."""
    rank = fleet.rank_at(slot)
    if rank is None:
        raise ValueError(f"slot {slot} is free")
    overlap, prefill, decode, transfer, multiplier, cost, times, blocks_at = costs
    if blocks_at is not None:
        prefill_blocks, decode_blocks = blocks_at(slot)
    else:
        prefill_blocks = 0.0 if prefill is None else prefill.item(slot)
        decode_blocks = 0.0 if decode is None else decode.item(slot)
    return Pick(
        slot=slot,
        rank=rank,
        leg=leg,
        overlap_blocks=0 if overlap is None else overlap.item(slot),
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        transfer_blocks=0.0 if transfer is None else transfer.item(slot),
        multiplier=1.0 if multiplier is None else multiplier.item(slot),
        cost=cost.item(slot),
        candidates=candidates,
        unseen=unseen,
        times=None if times is None else times.at(slot),
    )
