"""What is asked of the fleets of the herd: Poisson arrivals, the same for every number of routers."""

import random
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request: when it comes, how long it is, and a number that picks its router."""

    at_s: float
    isl_tokens: int
    osl_tokens: int
    lot: int


class Load:
    """Poisson arrivals of log-normal lengths; ``lasts_s`` of which the first ``warm_s`` are not sampled."""

    def __init__(
        self, name: str, *, rate: float, isl_tokens: int, osl_tokens: int, lasts_s: float, warm_s: float
    ) -> None:
        self.name = f"{name}: {rate:,.0f} requests/s, {isl_tokens:,} + {osl_tokens} tokens"
        self.warm_s = warm_s
        self._rate = rate
        self._lengths = (isl_tokens, osl_tokens)
        self._lasts_s = lasts_s

    def arrivals(self, seed: int) -> list[Arrival]:
        chance = random.Random(seed)
        arrivals = []
        at_s = chance.expovariate(self._rate)
        while at_s < self._lasts_s:
            isl_tokens, osl_tokens = (self._length(chance, mean) for mean in self._lengths)
            arrivals.append(Arrival(at_s, isl_tokens, osl_tokens, chance.getrandbits(32)))
            at_s += chance.expovariate(self._rate)
        return arrivals

    @staticmethod
    def _length(chance: random.Random, mean: int) -> int:
        """Log-normal, deviation 0.8: its mean is 1.38 times its median. From 4 to 8 times the mean."""
        return min(8 * mean, max(4, round(chance.lognormvariate(0.0, 0.8) * mean / 1.38)))
