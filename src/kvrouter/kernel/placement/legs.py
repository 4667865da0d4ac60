"""Builds the engine requests of a placement's legs."""

from msgspec import structs

from kvrouter.core.requests import EngineRequest, GenerateRequest, KvTransferParams, Leg, Sampling
from kvrouter.kernel.placement.placement import Placement

_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


def keeping_leg(
    request: GenerateRequest, placement: Placement, *, time_left_s: float | None
) -> EngineRequest:
    """Return the leg that makes the decode worker keep what it has of the prompt, for the prefill worker to
    fetch: a prefill leg of those blocks alone, of which an engine computes the last.
    """
    tokens = placement.prefill_pick.pulled_blocks * placement.block_size
    leg = prefill_leg(request, placement, time_left_s=time_left_s)
    return structs.replace(
        leg, token_ids=placement.token_ids[:tokens], dp_rank=placement.decision.decode.rank.dp_rank, call=None
    )


def prefill_leg(
    request: GenerateRequest,
    placement: Placement,
    *,
    time_left_s: float | None,
    kv_transfer_params: KvTransferParams | None = None,
) -> EngineRequest:
    """Return the prefill leg of a pair: it generates one token, which the decode leg generates again. With
    ``kv_transfer_params`` it fetches the prompt's first blocks.
    """
    sampling = structs.replace(request.sampling, max_tokens=1, min_tokens=0)
    return _leg(
        request,
        placement,
        _PREFILL,
        sampling,
        kv_transfer_params=kv_transfer_params,
        time_left_s=time_left_s,
    )


def last_leg(
    request: GenerateRequest,
    placement: Placement,
    *,
    kv_transfer_params: KvTransferParams | None,
    time_left_s: float | None,
) -> EngineRequest:
    """Return the answering leg, decode or aggregated; ``max_tokens`` is reduced by the tokens of earlier
    attempts, and to the room in the worker's context.
    """
    sampling, resumed_tokens = request.sampling, placement.resumed_tokens
    if resumed_tokens:
        sampling = structs.replace(
            sampling,
            max_tokens=sampling.max_tokens - resumed_tokens,
            min_tokens=max(0, sampling.min_tokens - resumed_tokens),
        )
    room_tokens = placement.decode_context_tokens - len(placement.token_ids)
    if request.context_tokens and 0 < room_tokens < sampling.max_tokens:  # the client left the length open
        sampling = structs.replace(
            sampling, max_tokens=room_tokens, min_tokens=min(sampling.min_tokens, room_tokens)
        )
    return _leg(
        request,
        placement,
        placement.decision.decode.leg,
        sampling,
        kv_transfer_params=kv_transfer_params,
        time_left_s=time_left_s,
    )


def _leg(
    request: GenerateRequest,
    placement: Placement,
    leg: Leg,
    sampling: Sampling,
    *,
    kv_transfer_params: KvTransferParams | None,
    time_left_s: float | None,
) -> EngineRequest:
    pick = placement.prefill_pick if leg is _PREFILL else placement.decision.decode
    return EngineRequest(
        request_id=request.request_id,
        attempt=placement.decision.attempt,
        leg=leg,
        model=request.model,
        token_ids=placement.token_ids,
        sampling=sampling,
        dp_rank=pick.rank.dp_rank,
        resumed_tokens=placement.resumed_tokens,
        bootstrap=placement.bootstrap,
        kv_transfer_params=kv_transfer_params,
        prefill_worker_id=placement.prefill_pick.rank.worker_id if leg is _DECODE else None,
        lora_name=request.lora_name,
        cache_namespace=request.cache_namespace,
        time_left_s=time_left_s,
        intake=request.intake,
        call=None if request.call is None else structs.replace(request.call),  # the router may empty its copy
        trace=request.trace,
    )
