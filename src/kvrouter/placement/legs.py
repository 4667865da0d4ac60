"""The legs of one attempt, as engines receive them."""

from msgspec.structs import replace

from kvrouter.core.requests import EngineRequest, GenerateRequest, KvTransferParams, Leg, Sampling
from kvrouter.placement.placement import Placement


def prefill_leg(
    request: GenerateRequest, placement: Placement, *, resumed_tokens: int, time_left_s: float | None
) -> EngineRequest:
    """The prefill of a pair: one token, which the decode leg will give again."""
    sampling = replace(request.sampling, max_tokens=1, min_tokens=0)
    return _leg(
        request,
        placement,
        Leg.PREFILL,
        sampling,
        resumed_tokens=resumed_tokens,
        kv_transfer_params=None,
        time_left_s=time_left_s,
    )


def last_leg(
    request: GenerateRequest,
    placement: Placement,
    *,
    resumed_tokens: int,
    kv_transfer_params: KvTransferParams | None,
    time_left_s: float | None,
) -> EngineRequest:
    """The leg that answers: decode, or all of it; ``max_tokens`` counts what is still wanted, and what the
    worker's context has room for.
    """
    sampling = request.sampling
    if resumed_tokens:
        sampling = replace(
            sampling,
            max_tokens=sampling.max_tokens - resumed_tokens,
            min_tokens=max(0, sampling.min_tokens - resumed_tokens),
        )
    room_tokens = placement.decode_context_tokens - len(placement.token_ids)
    if request.context_tokens and 0 < room_tokens < sampling.max_tokens:  # its client leaves the length open
        sampling = replace(sampling, max_tokens=room_tokens, min_tokens=min(sampling.min_tokens, room_tokens))
    return _leg(
        request,
        placement,
        placement.decision.decode.leg,
        sampling,
        resumed_tokens=resumed_tokens,
        kv_transfer_params=kv_transfer_params,
        time_left_s=time_left_s,
    )


def _leg(
    request: GenerateRequest,
    placement: Placement,
    leg: Leg,
    sampling: Sampling,
    *,
    resumed_tokens: int,
    kv_transfer_params: KvTransferParams | None,
    time_left_s: float | None,
) -> EngineRequest:
    pick = placement.prefill_pick if leg is Leg.PREFILL else placement.decision.decode
    return EngineRequest(
        request_id=request.request_id,
        attempt=placement.decision.attempt,
        leg=leg,
        model=request.model,
        token_ids=placement.token_ids,
        sampling=sampling,
        dp_rank=pick.rank.dp_rank,
        resumed_tokens=resumed_tokens,
        bootstrap=placement.bootstrap,
        kv_transfer_params=kv_transfer_params,
        prefill_worker_id=placement.prefill_pick.rank.worker_id if leg is Leg.DECODE else None,
        lora_name=request.lora_name,
        cache_namespace=request.cache_namespace,
        time_left_s=time_left_s,
        intake=request.intake,
        call=None if request.call is None else replace(request.call),  # the router may empty its own
    )
