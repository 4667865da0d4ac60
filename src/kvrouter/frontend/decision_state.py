"""Converts decisions to the HTTP API's types: explanations with candidates, and kept decisions."""

import asyncio
from collections.abc import Iterable, Sequence
from operator import attrgetter

from msgspec import structs

from kvrouter.api import decision_schema as api
from kvrouter.api.fleet_schema import Policy
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import RoutingRefused, SloUnreachable
from kvrouter.core.ids import WorkerRank
from kvrouter.core.requests import GenerateRequest, Leg
from kvrouter.core.workers import Enforcement
from kvrouter.frontend.errors import refusal_counts
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.service_levels import late_rows
from kvrouter.kernel.routing.decision_input import DecisionInput
from kvrouter.kernel.routing.interface import Candidate, Decision, Pick, Times
from kvrouter.kernel.topology.policy import Fallback, Preferred, Required, TransferConstraint, TransferPolicy
from kvrouter.router.kept_inputs import KeptRefusal
from kvrouter.router.model_router import KeptDecision


def decided(request: GenerateRequest, fleet: Fleet, decision: Decision) -> api.Explanation:
    """Return the explanation of a decision."""
    return _explanation(request, fleet, decision.mode, decision.rows, decision=decision, error=None)


def refused(
    request: GenerateRequest, fleet: Fleet, mode: RouterMode, error: RoutingRefused
) -> api.Explanation:
    """Return the explanation of a refusal; it is answered with status 200."""
    rows = [row for row in error.rows if isinstance(row, Candidate)]
    refusal = api.Refusal(code=error.code, message=error.message, refusals=refusal_counts(error))
    return _explanation(request, fleet, mode, rows, decision=None, error=refusal)


def attempt_of(kept: KeptDecision) -> api.Attempt:
    """Return a kept decision, without its candidates."""
    decision = kept.decision
    prefill, decode = _picks(decision)
    return api.Attempt(
        attempt=decision.attempt,
        decided_at=round(kept.decided_at_s, 6),
        trace_id=kept.trace_id or None,
        mode=decision.mode,
        prefill=prefill,
        decode=decode,
        pair_cost=_pair_cost(decision),
        constraint=constraint_of(decision.constraint),
        fallback_used=decision.fallback_used,
        cross_domain=decision.cross_domain,
        last_resort=decision.last_resort,
    )


async def attempts_of(kept: Iterable[KeptDecision], refusal: KeptRefusal | None) -> list[api.Attempt]:
    """Return the attempts of a request in order, with the candidates whose input is kept. Each is decided
    again, for which 1,000 ranks take about 20 ms: streams go on between two.
    """
    attempts = []
    for each in kept:
        attempts.append(structs.replace(attempt_of(each), table=_table(each.input)))
        await asyncio.sleep(0)
    if refusal is not None:
        attempts.append(_refused_attempt(refusal))
    return sorted(attempts, key=attrgetter("decided_at"))


def _refused_attempt(kept: KeptRefusal) -> api.Attempt:
    return api.Attempt(
        attempt=kept.attempt,
        decided_at=round(kept.refused_at_s, 6),
        trace_id=kept.trace_id or None,
        mode=kept.mode,
        prefill=None,
        decode=None,
        constraint=None,
        fallback_used=False,
        cross_domain=False,
        table=_table(kept.input, is_late=kept.code == SloUnreachable.code),
        error=api.Refusal(code=kept.code, message=kept.message, refusals=kept.refusals),
    )


def latest_of(kept: KeptDecision) -> api.LastDecision:
    """Return the last decision of a request, without its candidates."""
    fields = structs.asdict(attempt_of(kept))
    del fields["table"], fields["error"]
    seen = kept.seen
    return api.LastDecision(
        request_id=kept.decision.request_id,
        model=kept.model,
        isl_tokens=kept.isl_tokens,
        expected_cached_tokens=kept.overlap_tokens,
        cached_tokens=seen.cached_tokens,
        ttft_ms=None if seen.ttft_s is None else round(1e3 * seen.ttft_s, 3),
        has_table=kept.input is not None,
        **fields,
    )


def _table(decision_input: DecisionInput | None, *, is_late: bool = False) -> api.Legs | None:
    """Return the candidates of each leg, as they were then; None where the input is kept no longer."""
    if decision_input is None:
        return None
    rows = decision_input.candidates()
    return _legs(late_rows(rows) if is_late else rows, decision_input.fleet)


def _pair_cost(decision: Decision) -> float | None:
    """Return the cost of the pair; None without a pair, or when prefill was picked first."""
    prefill, decode = decision.prefill, decision.decode
    return None if prefill is None or not decision.together else prefill.cost + decode.cost


def _picks(decision: Decision) -> tuple[api.Pick | None, api.Pick | None]:
    """Return the picks for prefill and for decode; a router that only prefills has no decode pick."""
    if decision.decode.leg is Leg.PREFILL:
        return _pick(decision.decode), None
    return None if decision.prefill is None else _pick(decision.prefill), _pick(decision.decode)


def constraint_of(constraint: TransferConstraint | None) -> api.Constraint | None:
    """Return a prefill worker's constraint on its decode worker."""
    if constraint is None:
        return None
    policy = policy_state(constraint.policy)
    return api.Constraint(
        enforcement=policy.enforcement, domain=policy.domain, weight=policy.weight, value=constraint.value
    )


def policy_state(policy: TransferPolicy) -> Policy:
    """Return a transfer policy as the API has it."""
    match policy:
        case Required(domain):
            return Policy(enforcement=Enforcement.REQUIRED, domain=domain)
        case Fallback(domain):
            return Policy(enforcement=Enforcement.FALLBACK, domain=domain)
        case Preferred(domain, weight):
            return Policy(enforcement=Enforcement.PREFERRED, domain=domain, weight=weight)


def _explanation(
    request: GenerateRequest,
    fleet: Fleet,
    mode: RouterMode,
    rows: Sequence[Candidate],
    *,
    decision: Decision | None,
    error: api.Refusal | None,
) -> api.Explanation:
    legs, isl_tokens = _legs(rows, fleet), request.isl_tokens
    return api.Explanation(
        request_id=request.request_id,
        model=request.model,
        mode=mode,
        isl_tokens=isl_tokens,
        blocks=-(-isl_tokens // fleet.block_size),
        prefill=legs.prefill,
        decode=legs.decode,
        local_prefill=legs.local_prefill,
        constraint=None if decision is None else constraint_of(decision.constraint),
        fallback_used=decision is not None and decision.fallback_used,
        last_resort=decision is not None and decision.last_resort,
        error=error,
    )


def _legs(rows: Sequence[Candidate], fleet: Fleet) -> api.Legs:
    prefill_rows = [row for row in rows if row.leg is Leg.PREFILL]
    together = any(row.pair_cost is not None for row in rows)
    local_rows = [row for row in rows if together and row.leg is Leg.AGGREGATED]
    decode_rows = [
        row for row in rows if row.leg is Leg.DECODE or (row.leg is Leg.AGGREGATED and not together)
    ]
    return api.Legs(
        prefill=_leg(prefill_rows, fleet) if prefill_rows else None,
        decode=_leg(decode_rows, fleet) if decode_rows else None,
        local_prefill=_leg(local_rows, fleet) if local_rows else None,
    )


def _leg(rows: Iterable[Candidate], fleet: Fleet) -> api.Leg:
    chosen: api.RankId | None = None
    candidates: list[api.Candidate] = []
    for row in rows:
        if row.picked:
            chosen = _rank(row.rank)
        candidates.append(_candidate(row, fleet))
    return api.Leg(chosen=chosen, candidates=candidates)


def _candidate(row: Candidate, fleet: Fleet) -> api.Candidate:
    card = fleet.card(row.rank.worker_id)
    return api.Candidate(
        worker_id=row.rank.worker_id,
        dp_rank=row.rank.dp_rank,
        eligible=row.refused is None,
        reason=row.refused,
        domains={} if card is None else card.runtime_config.topology_domains,
        overlap_blocks=row.overlap_blocks,
        prefill_blocks=row.prefill_blocks,
        decode_blocks=row.decode_blocks,
        transfer_blocks=row.transfer_blocks,
        multiplier=row.multiplier,
        cost=row.cost,
        times=None if row.times is None else _times(row.times),
        pair_cost=row.pair_cost,
        partner=None if row.partner is None else _rank(row.partner),
        chosen=row.picked,
    )


def _pick(pick: Pick) -> api.Pick:
    return api.Pick(
        worker_id=pick.rank.worker_id,
        dp_rank=pick.rank.dp_rank,
        overlap_blocks=pick.overlap_blocks,
        prefill_blocks=pick.prefill_blocks,
        decode_blocks=pick.decode_blocks,
        transfer_blocks=pick.transfer_blocks,
        multiplier=pick.multiplier,
        cost=pick.cost,
        times=None if pick.times is None else _times(pick.times),
        candidates=pick.candidates,
        unseen=pick.unseen,
        pulled_blocks=pick.pulled_blocks,
    )


def _rank(rank: WorkerRank) -> api.RankId:
    return api.RankId(worker_id=rank.worker_id, dp_rank=rank.dp_rank)


def _times(times: Times) -> api.Times:
    """Return the parts and the expected time of the leg, in milliseconds."""
    parts = {name.removesuffix("_s") + "_ms": round(1e3 * part, 3) for name, part in times._asdict().items()}
    return api.Times(expected_ms=round(1e3 * times.expected_s, 3), **parts)
