"""Rules without knowledge of caches: in turn, at random, by the number of requests."""

from typing import ClassVar

import numpy as np

from kvrouter.core.hashing import mix64
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import FloatColumn, SlotColumn
from kvrouter.kernel.routing.interface import LegInput, PickInput
from kvrouter.sim.rules.rule import PublishedRule, Scores


class Random(PublishedRule):
    """Any worker: all cost the same."""

    source: ClassVar[str] = "every load balancer"

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:  # noqa: ARG002 - the port's signature
        """Return no cost: all slots are equal."""
        return np.zeros(len(allowed))


class RoundRobin(Random):
    """Every worker in its turn."""

    def __init__(self) -> None:
        self._turns = dict.fromkeys(Leg, 0)

    def pick(self, cost: FloatColumn, pick_input: PickInput) -> Slot:  # noqa: ARG002 - the port's signature
        """Take the next slot; each leg has its own turn."""
        turn = self._turns[pick_input.leg]
        self._turns[pick_input.leg] += 1
        return Slot(int(pick_input.allowed[turn % len(pick_input.allowed)]))


class LeastLoaded(PublishedRule):
    """The worker with the fewest requests placed there that have not ended."""

    source: ClassVar[str] = "Dynamo's least-loaded, AIBrix's least-request"

    def scores(self, leg_input: LegInput, allowed: SlotColumn) -> Scores:  # noqa: ARG002 - the port's signature
        """Count the requests."""
        return self.gateway.in_flight[allowed]


class PowerOfTwo(LeastLoaded):
    """Of two random workers, the one with fewer requests."""

    source: ClassVar[str] = "Mitzenmacher 2001; sglang-router's and vllm-router's power_of_two"

    def pick(self, cost: FloatColumn, pick_input: PickInput) -> Slot:
        """Draw two and take the better one; the first of equals."""
        allowed, draw = pick_input.allowed, pick_input.draw
        n = len(allowed)
        one = draw % n
        if n == 1:
            return Slot(int(allowed[0]))
        other = (one + 1 + mix64(draw) % (n - 1)) % n
        first, second = allowed[one], allowed[other]
        return Slot(int(first if cost[first] <= cost[second] else second))
