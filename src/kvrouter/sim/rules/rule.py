"""A published routing rule: a cost rule that also picks, and the state of the fleet that it may read."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import RequestId, Slot
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.kernel.fleet.columns import FloatColumn, SlotColumn
from kvrouter.kernel.routing.interface import Columns, LegInput, PickingRule, PickInput, RouteRequest, View

Scores = npt.NDArray[Any]


class Gateway(Protocol):
    """A gateway's knowledge, by slot. ``in_flight``: requests placed there that have not ended; ``waiting``
    and ``kv_use`` are of the rank's last load report: requests that wait, and the share of KV blocks in use.
    ``timing`` is the index of the engine's timing in ``timings``.
    """

    in_flight: npt.NDArray[np.int64]
    waiting: npt.NDArray[np.int64]
    kv_use: npt.NDArray[np.float64]
    timing: npt.NDArray[np.int64]

    @property
    def timings(self) -> Sequence[Timing]:
        """The timings of all engines that were here."""

    def session_of(self, request_id: RequestId) -> str:
        """Return the session of a request that has not ended, "" without one."""


class PublishedRule(PickingRule):
    """A published rule in place of the router's own; preferred taints have no effect under it.

    ``source``: where it is published. A replay sets ``gateway`` before the first decision.
    """

    source: ClassVar[str]
    gateway: Gateway

    @abstractmethod
    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Return the leg's cost at the ``allowed`` slots: at least one, in the order of ranks."""

    def columns(self, leg_input: LegInput) -> Columns:
        """Return the scores; infinity at slots that may not take the leg."""
        fleet = leg_input.view.fleet
        order = fleet.rank_order
        allowed = order if leg_input.among is None else order[leg_input.among[order]]
        cost: FloatColumn = np.full(fleet.n_slots, np.inf)
        cost[allowed] = self.scores(leg_input, allowed)
        return Columns(cost)

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:  # noqa: ARG002 - the port's signature
        """Return no cost: a replay has no other routers, whose requests it would spread."""
        return 0.0

    def pick(self, cost: FloatColumn, pick_input: PickInput) -> Slot:
        """Return the slot of the lowest cost; one of equals is drawn."""
        costs = cost[pick_input.allowed]
        best = np.flatnonzero(costs == costs.min())
        return Slot(int(pick_input.allowed[best[pick_input.draw % len(best)]]))


def cached_tokens(leg_input: LegInput, allowed: SlotColumn) -> FloatColumn:
    """Tokens of the prompt that each allowed slot holds, as the router's index has it."""
    if leg_input.overlap_blocks is None:
        return np.zeros(len(allowed))
    tokens: FloatColumn = np.multiply(
        leg_input.overlap_blocks[allowed], float(leg_input.view.fleet.block_size), dtype=np.float64
    )
    return tokens


def new_tokens(leg_input: LegInput, allowed: SlotColumn) -> FloatColumn:
    """Tokens of the prompt that each allowed slot would have to compute."""
    cached = cached_tokens(leg_input, allowed)
    return np.maximum(float(leg_input.request.isl_tokens) - cached, 0.0, dtype=np.float64)
