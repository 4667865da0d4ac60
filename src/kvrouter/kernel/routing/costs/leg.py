"""The cost columns of one leg by the configured rule; lower is better.

A rule is a file of this package, and one line of :mod:`kvrouter.core.cost_rules`. This module computes the
input of all rules: the overlap, the seconds of a transfer, and the multiplier::

    multiplier = exp(−tanh(sum of the weights of the preferred taints that the worker carries))

Columns are by slot; a column that would be 0 everywhere is None.
"""

from collections.abc import Mapping
from math import exp, tanh

import numpy as np

from kvrouter.core.ids import Slot, Taint
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import BoolColumn, FloatColumn, IntColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.fleet_links import transfer_seconds
from kvrouter.kernel.routing.interface import Costs, LegInput, RouteRequest, View, cost_rule
from kvrouter.kernel.routing.masks import fitted
from kvrouter.kernel.topology.policy import Preferred, TransferConstraint

_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


def leg_costs(
    request: RouteRequest,
    view: View,
    leg: Leg,
    overlap_score_weight: float,
    *,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
    stalls: bool = False,
    among: BoolColumn | None = None,
) -> Costs:
    """Return the cost columns of one leg; the arguments are those of :class:`LegInput`. ``constraint`` binds
    a decode leg.
    """
    settings, overlap = view.settings, overlap_of(view)
    rule = view.rule or cost_rule(settings.cost)
    transfer = transfer_s = None
    weight = settings.kv_transfer_weight
    if prefill_slot is not None and settings.links is not None and (weight > 0.0 or rule.needs.learned):
        transfer_s = transfer_seconds(request, view, settings.links, overlap, prefill_slot)
        if weight > 0.0:
            with np.errstate(over="ignore"):
                transfer = transfer_s * weight
    columns = rule.columns(
        LegInput(
            request,
            view,
            leg,
            overlap_score_weight,
            overlap,
            transfer_s,
            transfer,
            among,
            prefill_slot,
            stalls,
        )
    )
    multiplier = None
    if view.rule is None and (weights := preferred_taints(request, leg, constraint)):
        multiplier = multiplier_of(view.fleet, weights)
    if multiplier is not None:
        np.multiply(columns.cost, multiplier, out=columns.cost)
    return Costs(overlap, transfer, multiplier, columns)


def overlap_of(view: View) -> IntColumn | None:
    """Return the leading blocks of the request that each slot holds; None without an index."""
    return None if view.overlap_blocks is None else fitted(view.overlap_blocks, view.fleet.n_slots)


def preferred_taints(
    request: RouteRequest, leg: Leg, constraint: TransferConstraint | None
) -> Mapping[Taint, float]:
    """Return the weights of the taints that make a rank cheaper or dearer for this leg; empty if pinned."""
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
    None when it is 1 everywhere.
    """
    if not weights and not everywhere:
        return None
    sums = np.zeros(fleet.n_slots)
    with np.errstate(over="ignore"):  # tanh of an infinite sum is 1
        for taint in sorted(weights):
            sums += fleet.places.carries(taint) * weights[taint]
        sums += everywhere
    # The few distinct sums use math and not numpy, whose last bits depend on the machine.
    distinct = {*weights.values()} if len(weights) == 1 and not everywhere else {*sums.tolist()}
    multiplier = np.ones(fleet.n_slots)
    for weight in distinct - {0.0}:
        multiplier[sums == weight] = exp(-tanh(weight))
    return multiplier


def prefill_tokens(leg_input: LegInput) -> FloatColumn | None:
    """Return the prompt tokens that each slot would compute, queued ones included; None for decode legs, and
    without tracking.
    """
    view = leg_input.view
    if leg_input.leg is _DECODE or not view.settings.track_prefill_tokens:
        return None
    isl_tokens, overlap = float(leg_input.request.isl_tokens), leg_input.overlap_blocks
    active = fitted(view.prefill_tokens, view.fleet.n_slots)
    if overlap is None:
        return np.add(active, isl_tokens)
    tokens: FloatColumn = np.multiply(overlap, -float(view.fleet.block_size))
    tokens += isl_tokens
    np.maximum(tokens, 0.0, out=tokens)
    tokens += active
    return tokens


def decode_blocks(leg_input: LegInput) -> FloatColumn | None:
    """Return the blocks that each slot would hold for answers; None for prefill, or if not tracked."""
    view = leg_input.view
    if leg_input.leg is _PREFILL or not view.settings.track_active_blocks:
        return None
    n_slots = view.fleet.n_slots
    active = fitted(view.active_blocks, n_slots)
    if view.not_active is None:
        return np.add(active, float(leg_input.request.total_blocks))
    return np.add(active, fitted(view.not_active, n_slots), dtype=np.float64)
