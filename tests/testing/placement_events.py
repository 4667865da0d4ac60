"""Doubles for placement without a service."""

from dataclasses import dataclass, field
from typing import Any

from kvrouter.core.constraints import QueuePolicy
from kvrouter.core.ids import RouterId, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest
from kvrouter.kernel.fleet.circuit import CircuitSettings, Fault
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import RetryPlan
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.placement.attempt_request import attempt_request, prompt_of
from kvrouter.kernel.placement.cache_view import NoCacheView
from kvrouter.kernel.placement.placement import AttemptRequest, Draw
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.placement.waiting_line import WaitingLimits
from kvrouter.kernel.routing.interface import RoutingSettings
from tests.testing.router_harness import BLOCK_SIZE

A_DRAW = Draw(seed=0, turn=0, room=0)


def plain_placer(fleet: Fleet, **fields: Any) -> Placer:
    """A placer without replicas or cache, whose events nobody reads but for what ``fields`` say."""
    plain: dict[str, Any] = {
        "cache": NoCacheView(),
        "ledger": NativeLedger(1),
        "router_id": RouterId("here"),
        "settings": RoutingSettings(),
        "tracks_active_blocks": True,
        "circuits": CircuitSettings(failures=2, open_s=1.0, open_max_s=30.0),
        "circuit_seed": 1,
        "events": RecordedPlacementEvents(),
        "waiting": WaitingLimits(
            admission_places_max=8,
            admission_wait_s=5.0,
            domain_wait_s=5.0,
            policy=QueuePolicy.FCFS,
            request_timeout_s=600.0,
        ),
        "call_soon": lambda _call: None,
        "now_s": 0.0,
    }
    return Placer(fleet=fleet, **plain | fields)


def first_attempt(request: GenerateRequest) -> AttemptRequest:
    """The first attempt of a request, as usual."""
    return attempt_request(
        request,
        prompt_of(request, request.token_ids, block_size=BLOCK_SIZE),
        request.token_ids,
        attempt=0,
        excluded=frozenset(),
        kv_lost_from=frozenset(),
        plans=(RetryPlan.USUAL,),
    )


@dataclass(slots=True)
class RecordedPlacementEvents(PlacementEvents):
    """What placement told, in order."""

    heard: list[tuple[object, ...]] = field(default_factory=list)
    failures: list[tuple[WorkerId, Fault]] = field(default_factory=list)
    came_s: list[tuple[WorkerRank, float, float]] = field(default_factory=list)
    left: list[WorkerRank] = field(default_factory=list)
    turns: list[tuple[WorkerRank, bool, float]] = field(default_factory=list)
    links: list[tuple[str, bool, float]] = field(default_factory=list)

    def failed(self, worker_id: WorkerId, fault: Fault) -> None:
        """A leg failed through its worker's fault."""
        self.failures.append((worker_id, fault))

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A worker failed too often in a row."""
        self.heard.append(("opened", worker_id, fault, for_s))

    def closed(self, worker_id: WorkerId) -> None:
        """A worker brought something again."""
        self.heard.append(("closed", worker_id))

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, fault: Fault, *, for_s: float) -> None:
        """KV of a pair was lost."""
        self.heard.append(("pair_opened", prefill, decode, fault, for_s))

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """KV of a pair arrived again."""
        self.heard.append(("pair_closed", prefill, decode))

    def first_token_observed(self, rank: WorkerRank, *, predicted_s: float, seen_s: float) -> None:
        """A first token came."""
        self.came_s.append((rank, predicted_s, seen_s))

    def rank_speed_changed(self, rank: WorkerRank, *, is_slow: bool, slowness: float) -> None:
        """A rank is slow from now on, or no longer."""
        self.turns.append((rank, is_slow, slowness))

    def link_speed_changed(self, name: str, *, is_slow: bool, slowness: float) -> None:
        """A link is slow from now on, or no longer."""
        self.links.append((name, is_slow, slowness))

    def rank_gone(self, rank: WorkerRank) -> None:
        """A rank left of which first tokens came."""
        self.left.append(rank)
