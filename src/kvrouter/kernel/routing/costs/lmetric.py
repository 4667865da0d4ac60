"""LMetric's product of prompt tokens and requests (Wang et al., arXiv 2603.15202)::

    cost = prompt tokens to compute there · (requests there + 1) · multiplier

The paper's abstract multiplies the new prefill tokens, if a request went there, by the batch size. Those who
implemented it add the tokens that are queued there before: AIBrix's ``l_metric_local.go``, which counts the
request itself in the batch, and agentic-kvc, which does not. Where it does not count, all idle workers are
equal, whatever they hold. A decode leg, which prefills nothing, goes to the fewest requests.
"""

import numpy as np

from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import FloatColumn, IntColumn
from kvrouter.kernel.routing.costs.leg import decode_blocks, prefill_tokens
from kvrouter.kernel.routing.masks import fitted
from kvrouter.kernel.routing.request import Columns, CostRule, LegInput, Needs, RouteRequest, View


def product(tokens: FloatColumn | None, requests: IntColumn) -> FloatColumn:
    """Return prompt tokens times requests, this one included; the requests alone where no tokens count."""
    batch: FloatColumn = np.add(requests, 1.0)
    return batch if tokens is None else tokens * batch


class LMetricCost(CostRule):
    """Prompt tokens to compute there, times requests there."""

    needs = Needs(requests=True)

    def columns(self, given: LegInput) -> Columns:
        """Multiply; at least one token, so that requests count where nothing of a prompt is known, or all of
        it is cached.
        """
        view = given.view
        n_slots, known = view.fleet.n_slots, view.cost_input
        requests: IntColumn = np.zeros(n_slots, np.int64)
        if known is not None:
            requests = fitted(known.requests, n_slots)
        tokens, prefill = prefill_tokens(given), None
        if tokens is not None:
            prefill = tokens / float(view.fleet.block_size)
            tokens = np.maximum(tokens, 1.0)
        return Columns(product(tokens, requests), prefill, decode_blocks(given))

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:  # noqa: ARG002 - the port's signature
        """Return the request's own tokens."""
        if leg is Leg.DECODE or not view.settings.track_prefill_tokens:
            return 1.0
        return float(request.isl_tokens) or 1.0


RULE = LMetricCost()
