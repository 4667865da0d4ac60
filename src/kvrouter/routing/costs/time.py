"""The cost in predicted seconds, by :mod:`kvrouter.routing.prediction`::

cost = (overlap_score_weight · (queue_s + prefill_s) + memory_s + decode_s + others_s + turnover_s
        + transfer_s + price_s) · multiplier
"""

from functools import partial

from kvrouter.core.constraints import PdSelection
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.fleet import FloatColumn
from kvrouter.routing.links import price_seconds
from kvrouter.routing.prediction import LegTimes, own_s
from kvrouter.routing.request import (
    CostRule,
    Costs,
    LegInput,
    Needs,
    RouteRequest,
    Timed,
    Times,
    View,
)

_PREFILL, _DECODE, _JOINT = Leg.PREFILL, Leg.DECODE, PdSelection.JOINT
"""An enumeration's attributes are slow before Python 3.12."""


class TimeCost(CostRule):
    """Predicted seconds to the first token, and what the request costs others."""

    needs = Needs(requests=True, learned=True)

    def columns(self, given: LegInput) -> Costs:
        """Predict the seconds of each slot; those that are not ``among`` cost infinity. The blocks of a slot
        are counted when somebody asks for them.
        """
        view, leg, among = given.view, given.leg, given.among
        times = LegTimes(
            given.request,
            view,
            leg,
            given.overlap_blocks,
            overlap_score_weight=given.overlap_score_weight,
            stalls=given.stalls or (leg is _DECODE and view.settings.pd_selection is _JOINT),
        )
        cost, price_s = times.costs(view.fleet.n_slots, among), None
        if given.transfer_s is not None and given.prefill_slot is not None:
            cost += given.transfer_s
            price_s = price_seconds(given.request, view, given.overlap_blocks, given.prefill_slot)
            if price_s is not None:
                cost += price_s
        return given.costs(cost, timed=partial(_timed, given, times, price_s), is_masked=among is not None)

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:  # noqa: ARG002 - the port's signature
        """Return the request's own seconds."""
        return own_s(request, view, leg)


def _timed(
    given: LegInput, times: LegTimes, price_s: FloatColumn | None, slot: Slot, overlap_blocks: int
) -> Timed:
    at = times.at(
        slot,
        transfer_s=0.0 if given.transfer_s is None else given.transfer_s.item(slot),
        price_s=0.0 if price_s is None else price_s.item(slot),
    )
    return timed_at(given.request, given.view, given.leg, slot, overlap_blocks, at)


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


RULE = TimeCost()
