"""Answers of a standalone router: who takes a request, and what that asks of whoever sends the rest of it."""

from kvrouter.core.ids import Slot
from kvrouter.core.requests import Bootstrap, GenerateRequest
from kvrouter.fleet import Fleet
from kvrouter.frontend.explained import Json, policy_json
from kvrouter.routing.decision import Decision, Pick
from kvrouter.service.prefills import Prefilled
from kvrouter.topology import Fallback, Preferred, Required, TransferConstraint


def routed_json(
    request: GenerateRequest,
    fleet: Fleet,
    decision: Decision,
    *,
    bootstrap: Bootstrap | None,
    lease_ttl_s: float | None,
) -> Json:
    """Where a request goes; ``lease_ttl_s`` is None when nothing was booked."""
    return {
        "request_id": request.request_id,
        "model": request.model,
        "leg": decision.decode.leg.value,
        **_worker_json(decision.decode, fleet),
        "prefill": None if decision.prefill is None else _worker_json(decision.prefill, fleet),
        "bootstrap": bootstrap_json(bootstrap),
        "constraint": obeyed_json(decision.constraint),
        "fallback_used": decision.fallback_used,
        "isl_tokens": len(request.token_ids),
        "block_size": fleet.block_size,
        "booked": lease_ttl_s is not None,
        "lease_ttl_s": lease_ttl_s,
    }


def prefilled_json(request: GenerateRequest, fleet: Fleet, prefilled: Prefilled) -> Json:
    """Where a request's KV is, or will be, and how its decode leg gets it."""
    decision = prefilled.placement.decision
    return {
        "request_id": request.request_id,
        "model": request.model,
        **_worker_json(prefilled.placement.prefill_pick, fleet),
        "cached_tokens": prefilled.cached_tokens,
        "kv_transfer_params": prefilled.kv_transfer_params,
        "bootstrap": bootstrap_json(prefilled.bootstrap),
        "constraint": obeyed_json(decision.constraint),
        "isl_tokens": len(request.token_ids),
        "block_size": fleet.block_size,
    }


def bootstrap_json(bootstrap: Bootstrap | None) -> Json | None:
    """Where both legs of a bootstrap handoff meet."""
    if bootstrap is None:
        return None
    return {"host": bootstrap.host, "port": bootstrap.port, "room": bootstrap.room}


def obeyed_json(constraint: TransferConstraint | None) -> Json | None:
    """What the prefill worker asks of the decode worker, also in the form in which a request asks for it.

    ``routing_constraints`` go into ``nvext`` of the request that picks decode. Under ``fallback`` they hold
    while somebody meets them; where nobody does, decode is picked without.
    """
    if constraint is None:
        return None
    taint = constraint.taint
    wishes: Json = {}
    if taint is not None:
        match constraint.policy:
            case Required() | Fallback():
                wishes = {"required_taints": [taint]}
            case Preferred(weight=weight):
                wishes = {"preferred_taints": {taint: weight}}
    return {
        **policy_json(constraint.policy),
        "value": constraint.value,
        "taint": taint,
        "routing_constraints": wishes,
    }


def _worker_json(pick: Pick, fleet: Fleet) -> Json:
    card = fleet.card_at(Slot(pick.slot))
    here = card if card is not None and card.worker_id == pick.rank.worker_id else None
    return {
        "worker_id": pick.rank.worker_id,
        "dp_rank": pick.rank.dp_rank,
        "address": None if here is None else here.address,
        "domains": {} if here is None else here.runtime_config.topology_domains,
        "overlap_blocks": pick.overlap_blocks,
        "cost": pick.cost,
    }
