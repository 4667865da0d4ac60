"""KV flows between topology domains: one model's handoffs, bytes and cost, by the domain values of both ends.

The router computes the bytes: prompt tokens that the decode worker was not expected to have, times the
prefill worker's bytes per token. Engines may move less, or more.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.ids import WorkerRank
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.routing.fleet_links import kv_bytes_per_token

RECENT_S = 10.0
"""Handoffs of the last this many seconds are recent."""

BUCKET_S = 1.0
"""Handoffs within this time share one bucket."""

PAIRS_MAX = 4096
"""The most pairs of one model that are counted separately; later ones count as :data:`OTHERS`."""


class DomainPair(NamedTuple):
    """The domain values of the prefill and the decode worker. ``domain`` is None where workers have no
    topology, a value where its worker publishes none.
    """

    domain: str | None
    prefill: str | None
    decode: str | None


OTHERS = DomainPair(None, "others", "others")
"""All pairs after the first :data:`PAIRS_MAX`."""


class FlowReading(NamedTuple):
    """A pair's totals since the router's start. ``unsized`` handoffs have no bytes, because the prefill
    worker does not state its bytes per token; ``cost`` is None where no link had a price.
    """

    pair: DomainPair
    handoffs: int
    unsized: int
    bytes: int
    cost: float | None
    recent_handoffs: int
    recent_bytes: int


@dataclass(slots=True)
class _Bucket:
    begun_s: float
    handoffs: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Flow:
    handoffs: int = 0
    unsized: int = 0
    bytes: int = 0
    cost: float | None = None
    buckets: deque[_Bucket] = field(default_factory=lambda: deque(maxlen=int(RECENT_S / BUCKET_S) + 1))


class KvFlows:
    """Counts a handoff when its first token arrives. ``now_s`` is any monotonic clock."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._flows: dict[DomainPair, _Flow] = {}

    def handed_over(self, placement: Placement, *, now_s: float) -> None:
        """Count a pair's handoff at its first token, while the placement's transfer is still known."""
        prefill = placement.decision.prefill
        if prefill is None:
            return
        pair = self._pair_of(placement, prefill.rank)
        flow = self._flows.get(pair)
        if flow is None:
            flow = self._flows.setdefault(pair if len(self._flows) < PAIRS_MAX else OTHERS, _Flow())
        if not flow.buckets or now_s - flow.buckets[-1].begun_s >= BUCKET_S:
            flow.buckets.append(_Bucket(now_s))
        flow.handoffs += 1
        flow.buckets[-1].handoffs += 1
        is_here = self._fleet.rank_at(prefill.slot) == prefill.rank
        token_bytes = kv_bytes_per_token(self._fleet, prefill.slot) if is_here else 0
        if not token_bytes:
            flow.unsized += 1
            return
        cached_tokens = placement.decision.decode.overlap_blocks * placement.block_size
        kv_bytes = max(0, placement.prompt.isl_tokens - cached_tokens) * token_bytes
        flow.bytes += kv_bytes
        flow.buckets[-1].bytes += kv_bytes
        transfer = placement.transfer
        cost = None if transfer is None else transfer.table.cost(kv_bytes)
        if cost is not None:
            flow.cost = (flow.cost or 0.0) + cost

    def readings(self, *, now_s: float) -> list[FlowReading]:
        """Return the totals of every pair, in the order of first use."""
        found = []
        for pair, flow in self._flows.items():
            recent = [each for each in flow.buckets if now_s - each.begun_s < RECENT_S]
            found.append(
                FlowReading(
                    pair=pair,
                    handoffs=flow.handoffs,
                    unsized=flow.unsized,
                    bytes=flow.bytes,
                    cost=flow.cost,
                    recent_handoffs=sum(each.handoffs for each in recent),
                    recent_bytes=sum(each.bytes for each in recent),
                )
            )
        return found

    def _pair_of(self, placement: Placement, prefill: WorkerRank) -> DomainPair:
        """The pair in the transfer policy's domain, else in the broadest level of the prefill worker."""
        constraint = placement.decision.constraint
        domain: str | None = None
        if constraint is not None:
            domain = constraint.domain
        else:
            card = self._fleet.card(prefill.worker_id)
            levels = () if card is None else card.runtime_config.topology_levels
            domain = next(iter(levels), None)
        if domain is None:
            return DomainPair(None, None, None)
        return DomainPair(domain, placement.prefill_domains.get(domain), placement.decode_domains.get(domain))
