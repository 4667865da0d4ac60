"""The LMetric rule: the product of prompt tokens and requests (Wang et al., arXiv 2603.15202)::

    cost = prompt tokens to compute there · (requests there + 1) · multiplier

The paper's abstract multiplies the new prefill tokens, if the request went there, by the batch size.
Implementations add the tokens that are already queued there: AIBrix's ``l_metric_local.go``, which counts the
request itself in the batch, and agentic-kvc, which does not. If it does not count, all idle workers cost the
same, whatever they have cached. A decode leg, which prefills nothing, goes to the worker with the fewest
requests.
"""

import numpy as np

from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import FloatColumn, IntColumn
from kvrouter.kernel.routing.costs.leg import decode_blocks, prefill_tokens
from kvrouter.kernel.routing.interface import Columns, CostRule, LegInput, Needs, RouteRequest, View
from kvrouter.kernel.routing.masks import fitted


def product(tokens: FloatColumn | None, requests: IntColumn) -> FloatColumn:
    """Return prompt tokens times requests, this one included; the requests alone without ``tokens``."""
    batch: FloatColumn = np.add(requests, 1.0)
    return batch if tokens is None else tokens * batch


class LMetricCost(CostRule):
    """The rule that multiplies the prompt tokens to compute by the requests at the rank."""

    needs = Needs(requests=True)

    def columns(self, leg_input: LegInput) -> Columns:
        """Return the product at each slot, with at least one token, so that requests count when the prompt is
        unknown or fully cached.
        """
        view = leg_input.view
        n_slots, cost_input = view.fleet.n_slots, view.cost_input
        requests: IntColumn = np.zeros(n_slots, np.int64)
        if cost_input is not None:
            requests = fitted(cost_input.requests, n_slots)
        tokens, prefill = prefill_tokens(leg_input), None
        if tokens is not None:
            prefill = tokens / float(view.fleet.block_size)
            tokens = np.maximum(tokens, 1.0)
        return Columns(product(tokens, requests), prefill, decode_blocks(leg_input))

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:  # noqa: ARG002 - the port's signature
        """Return the tokens of the request itself."""
        if leg is Leg.DECODE or not view.settings.track_prefill_tokens:
            return 1.0
        return float(request.isl_tokens) or 1.0


RULE = LMetricCost()
