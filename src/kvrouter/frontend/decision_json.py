"""Decisions as JSON: an explanation with a row per candidate, and the kept decisions of a request."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import RoutingRefused
from kvrouter.core.ids import RequestId, WorkerRank
from kvrouter.core.requests import GenerateRequest, Leg
from kvrouter.fleet import Fleet
from kvrouter.frontend.errors import refusal_counts
from kvrouter.routing.request import Candidate, Decision, Pick, Times
from kvrouter.service.model_router import KeptDecision
from kvrouter.topology import Fallback, Preferred, Required, TransferConstraint
from kvrouter.topology.policy import TransferPolicy

Json = dict[str, object]


def decided_json(request: GenerateRequest, fleet: Fleet, decision: Decision) -> Json:
    """An explanation that ends with a choice."""
    return _candidate_row(request, fleet, decision.mode, decision.rows, decision=decision, error=None)


def refused_json(request: GenerateRequest, fleet: Fleet, mode: RouterMode, error: RoutingRefused) -> Json:
    """An explanation that ends with a refusal: it is an answer like any other."""
    rows = [row for row in error.rows if isinstance(row, Candidate)]
    refused: Json = {"code": error.code, "message": error.message, "refusals": refusal_counts(error)}
    return _candidate_row(request, fleet, mode, rows, decision=None, error=refused)


FleetOf = Callable[[str], Fleet | None]
"""Finds the fleet of a model, by its name; None where it is not served any more."""


def attempts_json(request_id: RequestId, attempts: Iterable[KeptDecision], fleet_of: FleetOf) -> Json:
    """Every kept decision of a request, in order. ``decided_at`` is in seconds since 1970, ``trace_id`` null
    where the request belongs to no trace, ``table`` null where no candidates were kept.
    """
    return {
        "request_id": request_id,
        "attempts": [{**_attempt_json(kept), "table": _table_json(kept, fleet_of)} for kept in attempts],
    }


def latest_json(latest: Iterable[KeptDecision]) -> Json:
    """The last decision of each request, without its candidates; ``has_table`` says whether they are kept."""
    return {
        "decisions": [
            {
                "request_id": kept.decision.request_id,
                "model": kept.model,
                **_attempt_json(kept),
                "has_table": bool(kept.rows),
            }
            for kept in latest
        ]
    }


def _attempt_json(kept: KeptDecision) -> Json:
    decision = kept.decision
    return {
        "attempt": decision.attempt,
        "decided_at": round(kept.decided_at_s, 6),
        "trace_id": kept.trace_id or None,
        "mode": decision.mode.value,
        **_picks_json(decision),
        "pair_cost": _pair_cost(decision),
        "constraint": constraint_json(decision.constraint),
        "fallback_used": decision.fallback_used,
        "cross_domain": decision.cross_domain,
        "last_resort": decision.last_resort,
    }


def _table_json(kept: KeptDecision, fleet_of: FleetOf) -> Json | None:
    """The candidates of each leg, as an explanation has them."""
    fleet = fleet_of(kept.model) if kept.rows else None
    return None if fleet is None else _legs_json(kept.rows, fleet)


def _pair_cost(decision: Decision) -> float | None:
    """What the pair costs together; None where there is none, or prefill was picked first."""
    prefill, decode = decision.prefill, decision.decode
    return None if prefill is None or not decision.together else prefill.cost + decode.cost


def _picks_json(decision: Decision) -> Json:
    """Who was picked for either leg; a router of prefill alone picks nobody for decode."""
    if decision.decode.leg is Leg.PREFILL:
        return {"prefill": _pick_json(decision.decode), "decode": None}
    prefill = None if decision.prefill is None else _pick_json(decision.prefill)
    return {"prefill": prefill, "decode": _pick_json(decision.decode)}


def constraint_json(constraint: TransferConstraint | None) -> Json | None:
    """What a prefill worker asks of its decode worker."""
    if constraint is None:
        return None
    policy = policy_json(constraint.policy)
    return {**policy, "value": constraint.value}


def policy_json(policy: TransferPolicy) -> Json:
    """How strictly KV keeps to its domain."""
    match policy:
        case Required(domain):
            return {"enforcement": "required", "domain": domain}
        case Fallback(domain):
            return {"enforcement": "fallback", "domain": domain}
        case Preferred(domain, weight):
            return {"enforcement": "preferred", "domain": domain, "weight": weight}


def _candidate_row(
    request: GenerateRequest,
    fleet: Fleet,
    mode: RouterMode,
    rows: Sequence[Candidate],
    *,
    decision: Decision | None,
    error: Mapping[str, object] | None,
) -> Json:
    isl_tokens = request.isl_tokens
    return {
        "request_id": request.request_id,
        "model": request.model,
        "mode": mode.value,
        "isl_tokens": isl_tokens,
        "blocks": -(-isl_tokens // fleet.block_size),
        **_legs_json(rows, fleet),
        "constraint": None if decision is None else constraint_json(decision.constraint),
        "fallback_used": decision is not None and decision.fallback_used,
        "last_resort": decision is not None and decision.last_resort,
        "error": error,
    }


def _legs_json(rows: Sequence[Candidate], fleet: Fleet) -> Json:
    prefill_rows = [row for row in rows if row.leg is Leg.PREFILL]
    together = any(row.pair_cost is not None for row in rows)
    local_rows = [row for row in rows if together and row.leg is Leg.AGGREGATED]
    decode_rows = [
        row for row in rows if row.leg is Leg.DECODE or (row.leg is Leg.AGGREGATED and not together)
    ]
    return {
        "prefill": _leg_json(prefill_rows, fleet) if prefill_rows else None,
        "decode": _leg_json(decode_rows, fleet) if decode_rows else None,
        "local_prefill": _leg_json(local_rows, fleet) if local_rows else None,
    }


def _leg_json(rows: Iterable[Candidate], fleet: Fleet) -> Json:
    chosen: Json | None = None
    candidates: list[Json] = []
    for row in rows:
        if row.picked:
            chosen = _rank_json(row.rank)
        candidates.append(_candidate_json(row, fleet))
    return {"chosen": chosen, "candidates": candidates}


def _candidate_json(row: Candidate, fleet: Fleet) -> Json:
    card = fleet.card(row.rank.worker_id)
    return {
        **_rank_json(row.rank),
        "eligible": row.refused is None,
        "reason": None if row.refused is None else row.refused.value,
        "domains": {} if card is None else card.runtime_config.topology_domains,
        **_cost_json(row),
        "pair_cost": row.pair_cost,
        "partner": None if row.partner is None else _rank_json(row.partner),
        "chosen": row.picked,
    }


def _pick_json(pick: Pick) -> Json:
    return {**_rank_json(pick.rank), **_cost_json(pick), "candidates": pick.candidates, "unseen": pick.unseen}


def _rank_json(rank: WorkerRank) -> Json:
    return {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank}


def _cost_json(of: Pick | Candidate) -> Json:
    return {
        "overlap_blocks": of.overlap_blocks,
        "prefill_blocks": of.prefill_blocks,
        "decode_blocks": of.decode_blocks,
        "transfer_blocks": of.transfer_blocks,
        "multiplier": of.multiplier,
        "cost": of.cost,
        "times": None if of.times is None else _times_json(of.times),
    }


def _times_json(times: Times) -> Json:
    """The parts in milliseconds, and what the leg itself is expected to take."""
    parts = {name.removesuffix("_s") + "_ms": round(1e3 * part, 3) for name, part in times._asdict().items()}
    return {"expected_ms": round(1e3 * times.expected_s, 3), **parts}
