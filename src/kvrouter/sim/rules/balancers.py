"""Rules that know nothing of caches: by turn, by chance, by the number of requests."""

from typing import ClassVar

from kvrouter.core.hashing import mix64
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.sim.rules.rule import RuleInput, lowest


class RoundRobin:
    """Every worker in its turn."""

    source: ClassVar[str] = "every load balancer"

    def __init__(self) -> None:
        self._turns = dict.fromkeys(Leg, 0)

    def pick(self, given: RuleInput) -> Slot:
        """Take the next one; each leg has turns of its own."""
        turn = self._turns[given.leg]
        self._turns[given.leg] += 1
        return Slot(int(given.allowed[turn % len(given.allowed)]))


class Random:
    """Any worker."""

    source: ClassVar[str] = "every load balancer"

    def pick(self, given: RuleInput) -> Slot:
        """Draw one."""
        return Slot(int(given.allowed[given.draw % len(given.allowed)]))


class LeastLoaded:
    """The worker with the fewest requests placed there that have not ended."""

    source: ClassVar[str] = "Dynamo's least-loaded, AIBrix's least-request"

    def pick(self, given: RuleInput) -> Slot:
        """Take the one with the fewest."""
        return lowest(given.loads.in_flight[given.allowed], given)


class PowerOfTwo:
    """Of two workers by chance, the one with fewer requests."""

    source: ClassVar[str] = "Mitzenmacher 2001; sglang-router's and vllm-router's power_of_two"

    def pick(self, given: RuleInput) -> Slot:
        """Draw two and take the better one; the first of equals."""
        n = len(given.allowed)
        one = given.draw % n
        if n == 1:
            return Slot(int(given.allowed[0]))
        other = (one + 1 + mix64(given.draw) % (n - 1)) % n
        first, second = given.allowed[one], given.allowed[other]
        in_flight = given.loads.in_flight
        return Slot(int(first if in_flight[first] <= in_flight[second] else second))
