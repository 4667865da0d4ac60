"""The legs of an attempt as engines receive them."""

import asyncio
import secrets
from collections.abc import Callable

from msgspec.structs import replace

from kvrouter.core.errors import DeadlineExceeded, KvrouterError, Unavailable
from kvrouter.core.requests import (
    EngineRequest,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Leg,
    Sampling,
)
from kvrouter.journey.journey import LegLost
from kvrouter.placement.placement import Placement
from kvrouter.routing.request import Pick
from kvrouter.transports.requests.port import (
    EngineStream,
    LegRepeated,
    ReaderTooSlow,
    RequestPlane,
    StreamBroken,
    WorkerFull,
)

INTAKE_BYTES = 8


def taken_in(request: GenerateRequest) -> GenerateRequest:
    """Return ``request`` with a name of its own: whatever ids clients give, its legs are no other's."""
    return replace(request, intake=secrets.token_hex(INTAKE_BYTES))


def prefill_leg(
    request: GenerateRequest, placement: Placement, *, resumed_tokens: int, time_left_s: float
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


OnCached = Callable[[int, int | None], None]
"""Hears how many prompt tokens the engine had cached, and how many it counts, where it reports that."""


async def read_prefill(stream: EngineStream, on_cached: OnCached) -> KvTransferParams | None:
    """Read a prefill leg to its end; return what it says about where its KV waits.

    Raises StreamBroken.
    """
    params: KvTransferParams | None = None
    async for chunk in stream:
        if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.CANCELLED:
            raise StreamBroken(chunk.error or "the engine cancelled the prefill")
        if chunk.cached_tokens is not None:
            on_cached(chunk.cached_tokens, chunk.prompt_tokens)
        if chunk.kv_transfer_params is not None:
            params = chunk.kv_transfer_params
        if chunk.finish is not None:
            return params
    raise StreamBroken("the stream ended without a last chunk")


async def open_decode(plane: RequestPlane, address: str, request: EngineRequest) -> EngineStream:
    """Open a decode leg. One whose KV waits at a prefill worker is opened also for a caller that is cancelled
    meanwhile, and is then cancelled: often only its worker can notify the prefill worker that nobody
    comes.

    Raises what the plane's ``open`` raises.
    """
    if not request.kv_transfer_params:
        return await plane.open(address, request)
    opening = asyncio.get_running_loop().create_task(_opened(plane, address, request))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_take_back)
        raise


async def _opened(plane: RequestPlane, address: str, request: EngineRequest) -> EngineStream:
    return await plane.open(address, request)


def _take_back(opening: "asyncio.Task[EngineStream]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().cancel("its client left while it was sent")


def lost_leg(pick: Pick, error: KvrouterError) -> LegLost:
    """Return what an error that a worker gave for a leg means to the request's journey."""
    return LegLost(
        pick.leg,
        pick.rank.worker_id,
        error.message,
        full=isinstance(error, WorkerFull),
        repeated=isinstance(error, LegRepeated),
        blameless=isinstance(error, Unavailable | DeadlineExceeded | ReaderTooSlow),
    )


def last_leg(
    request: GenerateRequest,
    placement: Placement,
    *,
    resumed_tokens: int,
    kv_transfer_params: KvTransferParams | None,
    time_left_s: float,
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
    time_left_s: float,
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
