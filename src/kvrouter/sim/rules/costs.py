"""Rules that add up what a worker would have to do."""

from typing import ClassVar

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.fleet import FloatColumn
from kvrouter.sim.rules.rule import RuleInput, lowest, new_tokens


class DynamoCost:
    """overlap_weight · prefill blocks + decode blocks, the least of it; with a temperature above 0 drawn by
    softmax over the costs, which are scaled to 0..1. A prefill leg has no decode blocks, the decode leg of a
    pair no prefill blocks.
    """

    source: ClassVar[str] = "NVIDIA Dynamo 1.6, KV router"

    def __init__(self, *, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        self._overlap_weight = overlap_weight
        self._temperature = temperature

    def pick(self, given: RuleInput) -> Slot:
        """Take the cheapest, or draw."""
        costs = self._costs(given)
        spread = costs.max() - costs.min()
        if self._temperature <= 0.0 or spread <= 0.0:
            return lowest(costs, given)
        shares = np.cumsum(np.exp(-(costs - costs.min()) / spread / self._temperature))
        aim = (given.draw >> 11) * 2.0**-53 * shares[-1]
        at = min(int(np.searchsorted(shares, aim, side="right")), len(costs) - 1)
        return Slot(int(given.allowed[at]))

    def _costs(self, given: RuleInput) -> FloatColumn:
        view, allowed = given.view, given.allowed
        costs = np.zeros(len(allowed))
        if given.leg is not Leg.DECODE:
            tokens = view.prefill_tokens[allowed] + new_tokens(given)
            costs += self._overlap_weight * tokens / view.fleet.block_size
        if given.leg is not Leg.PREFILL:
            costs += view.active_blocks[allowed]
            costs += given.request.total_blocks if view.not_active is None else view.not_active[allowed]
        return costs


class LMetric:
    """(prefill tokens queued there and new here) · (requests there, this one included): the least product.
    A decode leg, which prefills nothing, goes to the fewest requests.

    The paper's abstract multiplies the new prefill tokens, if a request went there, by the batch size. Those
    who implemented it add the tokens that are queued there before: AIBrix's ``l_metric_local.go``, which
    counts the request itself in the batch, and agentic-kvc, which does not. Where it does not count, all idle
    workers are equal, whatever they hold.
    """

    source: ClassVar[str] = "LMetric, arXiv 2603.15202; with queued tokens and batch + 1 as in AIBrix's"

    def pick(self, given: RuleInput) -> Slot:
        """Take the least product."""
        batch = given.loads.in_flight[given.allowed] + 1.0
        if given.leg is Leg.DECODE:
            return lowest(batch, given)
        return lowest((new_tokens(given) + given.view.prefill_tokens[given.allowed]) * batch, given)


class PredictedTtft:
    """Least predicted time to the first token: this prompt's own prefill by the engine's timing, and
    ``queue_ms_per_token`` for each token that is queued there; of equals the one with the fewest active
    blocks.

    A queued token takes that long on an engine with the default timing. On another it takes as much longer as
    a prompt of 8,192 tokens does.
    """

    source: ClassVar[str] = "measured for this project; the least predicted time of llm-d's latency scorer"

    def __init__(self, *, queue_ms_per_token: float = 0.017) -> None:
        self._queue_ms_per_token = queue_ms_per_token

    def pick(self, given: RuleInput) -> Slot:
        """Take the soonest."""
        view, allowed = given.view, given.allowed
        active = view.active_blocks[allowed]
        if given.leg is Leg.DECODE:
            return lowest(active, given)
        tokens, queued, whose = new_tokens(given), view.prefill_tokens[allowed], given.loads.timing[allowed]
        predicted_ms = np.empty(len(allowed))
        for number, timing in enumerate(given.loads.timings):
            here = whose == number
            queue_ms = self._queue_ms_per_token * _slowness(timing) * queued[here]
            predicted_ms[here] = _prefill_ms(timing, tokens[here], given.request.isl_tokens) + queue_ms
        soonest = predicted_ms == predicted_ms.min()
        return lowest(np.where(soonest, active, np.inf), given)


def _prefill_ms(timing: Timing, tokens: FloatColumn, isl_tokens: int) -> FloatColumn:
    """Return the time that the last ``tokens`` of a prompt take, were they computed in one step."""
    curve = (timing.prefill_quadratic * tokens + timing.prefill_linear) * tokens + timing.prefill_base
    attended = tokens * (isl_tokens - tokens) + tokens * (tokens + 1.0) / 2.0
    lasts: FloatColumn = curve + timing.prefill_attention * attended
    return lasts


def _slowness(timing: Timing) -> float:
    """Return how much longer a prompt of 8,192 tokens takes with this timing than with the default one."""
    prompt = np.array([8192.0])
    return float((_prefill_ms(timing, prompt, 8192) / _prefill_ms(Timing(), prompt, 8192))[0])
