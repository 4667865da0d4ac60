"""Bodies and answers of the standalone router's ``/v1/route`` and ``/v1/prefill``: decisions and bookings."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvrouter.api.decision_schema import Constraint, RankId


class RoutingConstraints(Struct, frozen=True, omit_defaults=True):
    """``nvext.routing_constraints`` for the request that picks the decode worker."""

    required_taints: Sequence[str] = ()
    preferred_taints: Mapping[str, float] = {}


class ObeyedConstraint(Constraint, frozen=True, kw_only=True, omit_defaults=True):
    """The prefill worker's constraint on the decode worker, also as the taints of a request."""

    taint: str | None
    routing_constraints: RoutingConstraints


class Bootstrap(Struct, frozen=True):
    """The address and room at which both legs of a bootstrap handoff connect."""

    host: str
    port: int
    room: int


class PickedWorker(RankId, frozen=True, kw_only=True):
    """The worker rank of a leg; ``address`` is None when the worker has left since the decision."""

    address: str | None
    domains: Mapping[str, str]
    overlap_blocks: int
    cost: float


class Routed(Struct, frozen=True, kw_only=True):
    """``POST /v1/route``; ``lease_ttl_s`` is None when the request was not booked."""

    request_id: str
    model: str
    leg: str
    worker_id: int
    dp_rank: int
    address: str | None
    domains: Mapping[str, str]
    overlap_blocks: int
    cost: float
    prefill: PickedWorker | None
    bootstrap: Bootstrap | None
    constraint: ObeyedConstraint | None
    fallback_used: bool
    isl_tokens: int
    block_size: int
    booked: bool
    lease_ttl_s: float | None


class Prefilled(Struct, frozen=True, kw_only=True):
    """``POST /v1/prefill``: the worker that holds or computes the KV, and how the decode leg fetches it."""

    request_id: str
    model: str
    worker_id: int
    dp_rank: int
    address: str | None
    domains: Mapping[str, str]
    overlap_blocks: int
    cost: float
    cached_tokens: int | None
    kv_transfer_params: Any
    bootstrap: Bootstrap | None
    constraint: ObeyedConstraint | None
    isl_tokens: int
    block_size: int


class OutputBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v1/route/{request_id}/output_blocks``."""

    blocks: Annotated[int, Meta(ge=1, le=2**20)]


class Booking(Struct, frozen=True):
    """The state of a booking; ``lease_ttl_s`` is None once it has ended."""

    request_id: str
    booked: bool
    lease_ttl_s: float | None


class PrefillEnded(Struct, frozen=True):
    """``DELETE /v1/prefill/{request_id}``."""

    request_id: str
