"""KV between domains: handoffs, bytes and cost of one model, by the domain's values at both ends.

Bytes are what a router counts itself: the prompt's tokens that the decode worker was not expected to have, at
the prefill worker's bytes a token. Engines may move less, or more.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.ids import WorkerRank
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.routing.fleet_links import kv_bytes_per_token

RECENT_S = 10.0
"""How long what was handed over counts as recent."""

BUCKET_S = 1.0
"""What is handed over within this time is kept as one sum."""

PAIRS_MAX = 4096
"""Pairs of values that one model counts by themselves: those that come later are counted as one."""


class DomainPair(NamedTuple):
    """The domain's values where KV comes from and where it goes. ``domain`` is None where workers have no
    place, a value where its worker does not publish one.
    """

    domain: str | None
    prefill: str | None
    decode: str | None


OTHERS = DomainPair(None, "others", "others")
"""Stands for all pairs after the first :data:`PAIRS_MAX`."""


class FlowReading(NamedTuple):
    """What went from one value to another since the router began. ``unsized`` handoffs have no bytes, because
    their prefill worker does not say how many a token has; ``cost`` is None where no link had a price.
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
    """Counts handoffs as their first tokens come. ``now_s`` is any clock that never goes back."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._flows: dict[DomainPair, _Flow] = {}

    def handed_over(self, placement: Placement, *, now_s: float) -> None:
        """The first token of a pair came: its KV went over. Asked while its transfer is still known."""
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
        """Return every pair that KV went between, in the order of first use."""
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
        """By the domain that the transfer policy names, else by the broadest level of the prefill worker."""
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
