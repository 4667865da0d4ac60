"""A toy cost rule: all that a new rule needs in its own file."""

import numpy as np

from kvrouter.core.requests import Leg
from kvrouter.kernel.routing.interface import Columns, CostRule, LegInput, Needs, RouteRequest, View


class ToyCost(CostRule):
    """Requests there, squared."""

    needs = Needs(requests=True)

    def columns(self, given: LegInput) -> Columns:
        known = given.view.cost_input
        requests = np.zeros(given.view.fleet.n_slots) if known is None else known.requests
        return Columns(np.square(requests, dtype=np.float64))

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:
        return 1.0


RULE = ToyCost()
