"""A fleet at light load on a simulated clock: few requests at a time, whose times are noisy."""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from kvrouter.core.ids import RequestId, Slot
from kvrouter.core.requests import GenerateRequest, Sampling
from kvrouter.core.timing import Timing
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import NativeApproximateIndex
from kvrouter.kernel.placement.cache_view import PredictedCacheView
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.routing.interface import RoutingSettings
from tests.testing.placement_events import RecordedPlacementEvents, first_attempt, plain_placer
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

OSL_TOKENS = 32

NOISE = 0.2
"""Each time is longer or shorter by at most this share."""


class Served(NamedTuple):
    """One request: where it went, in the order in which they came."""

    slot: Slot
    isl_tokens: int
    waited_s: float
    """How long others' prompts were computed before its own was."""


class LightLoad:
    """Equal workers, but for ``slowness`` by slot. Each prompt shares nothing with another."""

    def __init__(self, seed: int, *, n_workers: int = 8, slowness: dict[int, float] | None = None) -> None:
        self.rng = Random(seed)
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        for worker_id in range(1, n_workers + 1):
            self.fleet.join(card(worker_id, Role.BOTH))
        self.timing = Timing()
        self.slowness = slowness or {}
        self.now_s = 100.0
        self.placer = plain_placer(
            self.fleet,
            cache=PredictedCacheView(NativeApproximateIndex(ttl_s=120.0)),
            settings=RoutingSettings(cost="time"),
            circuit_seed=seed,
            events=RecordedPlacementEvents(),
            call_soon=lambda _call: None,
            now_s=self.now_s,
        )
        self.computes_until_s = [0.0] * n_workers

    def run(self, n_requests: int, *, at_once: int, lengths: Sequence[int] = (500,)) -> list[Served]:
        """Send so many requests, ``at_once`` of them at any time, of drawn ``lengths`` in tokens."""
        served: list[Served] = []
        due: list[tuple[float, int, str, Placement]] = []
        n_sent = n_ended = 0
        while n_ended < n_requests:
            while n_sent < n_requests and n_sent - n_ended < at_once:
                isl_tokens = self.rng.choice(lengths)
                placement = self._place(n_sent, isl_tokens)
                slot = placement.decision.decode.slot
                begins_s = max(self.now_s, self.computes_until_s[slot])
                takes_s = self.timing.prefill_ms(isl_tokens) / 1e3 * self._noise(slot)
                self.computes_until_s[slot] = begins_s + takes_s
                heappush(due, (begins_s + takes_s, n_sent, "first", placement))
                served.append(Served(slot, isl_tokens, begins_s - self.now_s))
                n_sent += 1
            self.now_s, number, what, placement = heappop(due)
            if what == "first":
                self.placer.first_token(placement, now_s=self.now_s)
                slot = placement.decision.decode.slot
                step_s = self.timing.decode_ms(0.0, 1, placement.prompt.isl_tokens) / 1e3
                ends_s = self.now_s + (OSL_TOKENS - 1) * step_s * self._noise(slot)
                heappush(due, (ends_s, number, "end", placement))
            else:
                self.placer.release(placement, now_s=self.now_s, tokens=OSL_TOKENS)
                n_ended += 1
        return served

    def _noise(self, slot: int) -> float:
        return self.rng.uniform(1.0 - NOISE, 1.0 + NOISE) * self.slowness.get(slot, 1.0)

    def _place(self, number: int, isl_tokens: int) -> Placement:
        tokens = array("I", [self.rng.getrandbits(31) for _ in range(isl_tokens)])
        request = GenerateRequest(
            request_id=RequestId(f"request-{number}"),
            model=MODEL,
            token_ids=tokens,
            sampling=Sampling(max_tokens=OSL_TOKENS),
        )
        return self.placer.place(
            first_attempt(request), Draw(self.rng.getrandbits(64), number, 0), now_s=self.now_s
        )
