"""What the decision is made from: one request, and one frozen reading of the fleet."""

import msgspec

from kvrouter.core.constraints import Pin, RouterConfigOverride, RoutingConstraints
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.fleet import Fleet, IntColumn
from kvrouter.routing.settings import RoutingSettings


class RouteRequest(msgspec.Struct, frozen=True):
    """What routing needs to know of one attempt of a request.

    ``total_blocks`` counts a partial tail. ``pin`` is for the decode leg, or for the whole request when it is
    not split; ``prefill_pin`` for the prefill leg. ``excluded`` workers have failed this request before.
    ``whole`` asks for one worker that does all of it, although prefill workers are here: no KV is handed on.
    ``whole_if_parted`` asks for that where KV was lost lately between every pair that could be made.
    ``last_resort``: also workers whose circuit is open may take it, because nobody else may.
    ``context_tokens``: what the context of a worker must hold that answers, 0 where that is not known.
    ``has_media``: what engines hold of it can only be predicted, beyond the text that it begins with.
    """

    request_id: RequestId
    isl_tokens: int
    total_blocks: int
    constraints: RoutingConstraints = RoutingConstraints()
    override: RouterConfigOverride = RouterConfigOverride()
    pin: Pin | None = None
    prefill_pin: Pin | None = None
    excluded: frozenset[WorkerId] = frozenset()
    attempt: int = 0
    whole: bool = False
    whole_if_parted: bool = False
    last_resort: bool = False
    has_media: bool = False
    context_tokens: int = 0


class View(msgspec.Struct, frozen=True):
    """One reading of everything that the decision depends on; each column has a slot's entry at its index
    and at least ``fleet.n_slots`` entries.

    ``overlap_blocks``: leading blocks of the request that are there; None when no index is kept.
    ``prefill_tokens``, ``active_blocks``: the ledger's load. ``not_active``: the request's blocks that are
    not among the active ones there; None says that all of them are new everywhere. ``seed`` is for draws,
    ``turn`` counts requests for round-robin. ``unseen`` is how many requests other routers have placed, as
    may be expected, that are not in the load yet. ``tokens_at_report``, ``blocks_at_report``: the ledger's
    load when the slot's latest load report was taken; None where all that is booked is in the report.
    """

    fleet: Fleet
    settings: RoutingSettings
    overlap_blocks: IntColumn | None
    prefill_tokens: IntColumn
    active_blocks: IntColumn
    not_active: IntColumn | None
    seed: int = 0
    turn: int = 0
    unseen: float = 0.0
    tokens_at_report: IntColumn | None = None
    blocks_at_report: IntColumn | None = None


def fitted(column: IntColumn, n_slots: int) -> IntColumn:
    """Return the first ``n_slots`` entries; raises ValueError when the column is shorter."""
    length = len(column)
    if length == n_slots:
        return column
    if length < n_slots:
        raise ValueError(f"a column of {length} entries for a fleet of {n_slots} slots")
    return column[:n_slots]
