"""The blocks rule: the cost in blocks to prefill and to decode::

    prefill_blocks  = (active prefill tokens + max(0, isl_tokens − overlap_blocks · block_size)) / block_size
    decode_blocks   = active blocks + the request's blocks that are not active there
    transfer_blocks = kv_transfer_weight · (latency_s + kv_bytes / bandwidth_bytes_per_s)
    cost            = (overlap_score_weight · prefill_blocks + decode_blocks + transfer_blocks) · multiplier

A prefill leg has no decode_blocks, and the decode leg of a pair no prefill_blocks; only that decode leg has
transfer_blocks.
"""

import numpy as np

from kvrouter.core.requests import Leg
from kvrouter.kernel.routing.costs.leg import decode_blocks, prefill_tokens
from kvrouter.kernel.routing.interface import Columns, CostRule, LegInput, RouteRequest, View


class BlocksCost(CostRule):
    """The rule that adds the blocks to prefill and to decode."""

    def columns(self, leg_input: LegInput) -> Columns:
        """Return the sum of blocks at each slot."""
        view, weight, transfer = leg_input.view, leg_input.overlap_score_weight, leg_input.transfer_blocks
        prefill, decode = prefill_tokens(leg_input), decode_blocks(leg_input)
        if prefill is None:
            cost = np.zeros(view.fleet.n_slots) if decode is None else decode.copy()
        else:
            prefill /= float(view.fleet.block_size)
            if weight == 1.0:
                cost = prefill.copy() if decode is None else prefill + decode
            else:
                with np.errstate(over="ignore"):  # an infinite cost is valid
                    cost = prefill * weight
                if decode is not None:
                    cost += decode
        if transfer is not None:
            cost += transfer
        return Columns(cost, prefill, decode)

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:
        """Return the blocks of the request itself."""
        blocks = 0.0
        if leg is not Leg.DECODE and view.settings.track_prefill_tokens:
            blocks += overlap_score_weight * request.isl_tokens / view.fleet.block_size
        if leg is not Leg.PREFILL and view.settings.track_active_blocks:
            blocks += request.total_blocks
        return blocks


RULE = BlocksCost()
