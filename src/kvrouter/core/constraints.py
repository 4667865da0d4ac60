"""A request's constraints on routing: taints, pins and overridden settings."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from kvrouter.core.ids import DpRank, Taint, WorkerId


class RouterMode(StrEnum):
    """How routing picks a worker among the eligible ones."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class PdSelection(StrEnum):
    """How routing picks a prefill and a decode worker."""

    SEQUENTIAL = "sequential"
    """Prefill first, then decode for its KV."""
    JOINT = "joint"
    """The pair that costs least together, or a decode worker that prefills for itself."""


class QueuePolicy(StrEnum):
    """In which order waiting requests are tried."""

    FCFS = "fcfs"
    """As they came."""
    SHORTEST = "shortest"
    """The least prefill first; its time counts against the time that a request has waited."""
    DEADLINE = "deadline"
    """The earliest end of a request's time first."""


class NearEnforcement(StrEnum):
    """How strictly prefill keeps near the frontend."""

    REQUIRED = "required"
    PREFERRED = "preferred"


class RoutingConstraints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Taints that a worker must carry (all of them), and taints that make it cheaper (> 0) or dearer (< 0).

    ``required_decode_taints`` hold for the worker of the decode leg or of an aggregated request, not for the
    worker of the prefill leg.
    """

    required_taints: frozenset[Taint] = frozenset()
    preferred_taints: Mapping[Taint, float] = {}
    required_decode_taints: frozenset[Taint] = frozenset()


class RouterConfigOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the decision that one request may override; None keeps the router's."""

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    router_mode: RouterMode | None = None


class Pin(msgspec.Struct, frozen=True):
    """Route to this worker, and to this rank of it when given; eligibility still holds."""

    worker_id: WorkerId
    dp_rank: DpRank | None = None
