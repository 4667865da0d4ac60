"""Rules that sum up a worker's expected work."""

from typing import ClassVar

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.kernel.fleet.columns import FloatColumn, SlotColumn
from kvrouter.kernel.routing.costs.lmetric import product
from kvrouter.kernel.routing.interface import LegInput, PickInput
from kvrouter.sim.rules.rule import PublishedRule, Scores, new_tokens


class DynamoCost(PublishedRule):
    """overlap_weight · prefill blocks + decode blocks, the least of it; with a temperature above 0 drawn by
    softmax over the costs, which are scaled to 0..1. A prefill leg has no decode blocks, the decode leg of a
    pair no prefill blocks.
    """

    source: ClassVar[str] = "NVIDIA Dynamo 1.6, KV router"

    def __init__(self, *, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        self._overlap_weight = overlap_weight
        self._temperature = temperature

    def pick(self, cost: FloatColumn, pick_input: PickInput) -> Slot:
        """Take the cheapest, or draw."""
        costs = cost[pick_input.allowed]
        spread = costs.max() - costs.min()
        if self._temperature <= 0.0 or spread <= 0.0:
            return super().pick(cost, pick_input)
        shares = np.cumsum(np.exp(-(costs - costs.min()) / spread / self._temperature))
        aim = (pick_input.draw >> 11) * 2.0**-53 * shares[-1]
        at = min(int(np.searchsorted(shares, aim, side="right")), len(costs) - 1)
        return Slot(int(pick_input.allowed[at]))

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Add up the blocks."""
        view = leg_input.view
        costs = np.zeros(len(allowed))
        if leg_input.leg is not Leg.DECODE:
            tokens = view.prefill_tokens[allowed] + new_tokens(leg_input, allowed)
            costs += self._overlap_weight * tokens / view.fleet.block_size
        if leg_input.leg is not Leg.PREFILL:
            costs += view.active_blocks[allowed]
            costs += leg_input.request.total_blocks if view.not_active is None else view.not_active[allowed]
        return costs


class LMetric(PublishedRule):
    """:func:`~kvrouter.kernel.routing.costs.lmetric.product` by the requests that a gateway counts."""

    source: ClassVar[str] = "LMetric, arXiv 2603.15202; with queued tokens and batch + 1 as in AIBrix's"

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Multiply."""
        tokens: FloatColumn | None = None
        if leg_input.leg is not Leg.DECODE:
            tokens = new_tokens(leg_input, allowed) + leg_input.view.prefill_tokens[allowed]
        return product(tokens, self.gateway.in_flight[allowed])


class PredictedTtft(PublishedRule):
    """Least predicted time to the first token: this prompt's own prefill by the engine's timing, and
    ``queue_ms_per_token`` for each token that is queued there; of equals the one with the fewest active
    blocks.

    A queued token takes that long on an engine with the default timing. On another it takes as much longer as
    a prompt of 8,192 tokens does.
    """

    source: ClassVar[str] = "measured for this project; the least predicted time of llm-d's latency scorer"

    def __init__(self, *, queue_ms_per_token: float = 0.017) -> None:
        self._queue_ms_per_token = queue_ms_per_token

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:
        """Return the costs: infinity except for the least predicted time."""
        view = leg_input.view
        active = view.active_blocks[allowed]
        if leg_input.leg is Leg.DECODE:
            return active
        tokens, queued = new_tokens(leg_input, allowed), view.prefill_tokens[allowed]
        timing_index, predicted_ms = self.gateway.timing[allowed], np.empty(len(allowed))
        for number, timing in enumerate(self.gateway.timings):
            here = timing_index == number
            queue_ms = self._queue_ms_per_token * _slowness(timing) * queued[here]
            predicted_ms[here] = _prefill_ms(timing, tokens[here], leg_input.request.isl_tokens) + queue_ms
        soonest = predicted_ms == predicted_ms.min()
        return np.where(soonest, active, np.inf)


def _prefill_ms(timing: Timing, tokens: FloatColumn, isl_tokens: int) -> FloatColumn:
    """Return the time that the last ``tokens`` of a prompt take, were they computed in one step."""
    curve = (timing.prefill_quadratic * tokens + timing.prefill_linear) * tokens + timing.prefill_base
    attended = tokens * (isl_tokens - tokens) + tokens * (tokens + 1.0) / 2.0
    lasts: FloatColumn = curve + timing.prefill_attention * attended
    return lasts


def _slowness(timing: Timing) -> float:
    """Return the ratio of this timing's time to the default one's for a prompt of 8,192 tokens."""
    prompt = np.array([8192.0])
    return float((_prefill_ms(timing, prompt, 8192) / _prefill_ms(Timing(), prompt, 8192))[0])
