"""What one side of the comparison did: every decision that it booked, and its engines' own stamps."""

import msgspec

from benchmarks.live.decisions import SeenDecision, see
from kvrouter.core.ids import RequestId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.engines.mock_engine.sequence import LegStamps
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.routing.interface import Decision, RouteRequest, View


class Observed(msgspec.Struct):
    """What was seen of one side. ``settings`` are those of its decisions. ``slipped_s``: how long the live
    engines' clock stood still, because the machine was too slow for them.
    """

    settings: str = ""
    decisions: list[SeenDecision] = msgspec.field(default_factory=list)
    legs: list[LegStamps] = msgspec.field(default_factory=list)
    slipped_s: float = 0.0


class Figures(msgspec.Struct, frozen=True):
    """One answered request, by the clock of the engines: from the arrival of its first leg at an engine to
    its first token, and between two of its tokens on average (None with fewer than two).
    """

    ttft_s: float
    itl_s: float | None
    output_tokens: int
    cached_tokens: int


class Observer:
    """Notes what a placer decides, and the stamps of legs that it is given."""

    def __init__(self) -> None:
        self.observed = Observed()

    def watch(self, placer: Placer) -> None:
        """Note every decision from now on."""
        self.observed.settings = repr(placer.settings)
        placer.on_decided = self._decided

    def leg_ended(self, stamps: LegStamps) -> None:
        """A leg generated its last token."""
        self.observed.legs.append(stamps)

    def _decided(
        self, route_request: RouteRequest, view: View, decision: Decision, *, prefill: WorkerRank | None
    ) -> None:
        self.observed.decisions.append(see(route_request, view, decision, prefill=prefill))


def figures(observed: Observed) -> dict[RequestId, Figures]:
    """Return the figures of each request that was answered in its first attempt."""
    legs: dict[RequestId, dict[Leg, LegStamps]] = {}
    for stamps in observed.legs:
        if stamps.attempt == 0:
            legs.setdefault(stamps.request_id, {})[stamps.leg] = stamps
    return {request_id: _figures(of) for request_id, of in legs.items() if of.keys() != {Leg.PREFILL}}


def _figures(legs: dict[Leg, LegStamps]) -> Figures:
    last = legs.get(Leg.DECODE) or legs[Leg.AGGREGATED]
    first = legs.get(Leg.PREFILL, last)
    gaps = last.output_tokens - 1
    return Figures(
        ttft_s=last.first_s - min(leg.came_s for leg in legs.values()),
        itl_s=(last.last_s - last.first_s) / gaps if gaps else None,
        output_tokens=last.output_tokens,
        cached_tokens=first.cached_tokens,
    )
