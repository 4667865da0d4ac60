"""What one request holds while it runs: its times, and what its current attempt has open."""

import asyncio
from dataclasses import dataclass, field

from kvrouter.journey.words import LegLost
from kvrouter.planes.requests.port import EngineStream
from kvrouter.service.placement import Placement


@dataclass(slots=True)
class Times:
    """When things happened, on the monotonic clock, in seconds."""

    begun_s: float
    placed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(slots=True)
class Attempt:
    """What one attempt holds; all of it is given back when the attempt is abandoned."""

    placement: Placement
    prefill: EngineStream | None = None
    prefill_task: asyncio.Task[None] | None = None
    decode: EngineStream | None = None
    lost: list[LegLost] = field(default_factory=list)
    prefill_sent_s: float = 0.0
    last_sent_s: float = 0.0
    """When its legs were sent, on the monotonic clock; the last leg is the one that answers."""
