"""Leg outcomes: opens and reads a request's legs, and turns their answers and errors into journey events."""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from kvrouter.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvrouterError,
    ProtocolError,
    ShuttingDown,
    Unavailable,
)
from kvrouter.core.ids import RandomHex
from kvrouter.core.requests import (
    ClientCall,
    EngineRequest,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
)
from kvrouter.kernel.journey import LegLost, LegRefused, PrefillDone
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.routing.interface import Pick
from kvrouter.transports.requests.port import (
    EngineFailed,
    EngineStream,
    LegRepeated,
    ReaderTooSlow,
    RequestTransport,
    SentLeg,
    StreamBroken,
    WorkerDeclined,
    WorkerFull,
)

_INTAKES = RandomHex(16)


class KvNotPulled(StreamBroken):
    """A prefill worker did not get the KV that it was to fetch from a decode worker."""


def with_intake_id(request: GenerateRequest) -> GenerateRequest:
    """Return ``request`` with a unique intake id, which names its legs whatever id the client chose."""
    return replace(request, intake=_INTAKES.take())


OnCached = Callable[[int, int | None], None]
"""Called with the engine's counts of cached and of prompt tokens, where it reports them."""


async def read_prefill(stream: EngineStream, on_cached: OnCached) -> KvTransferParams | None:
    """Read a prefill leg to its end; return the engine's parameters for fetching its KV, or None.

    Raises StreamBroken, or KvNotPulled.
    """
    params: KvTransferParams | None = None
    async for chunk in stream:
        if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.CANCELLED:
            broken = StreamBroken if chunk.kv_lost is None else KvNotPulled
            raise broken(chunk.error or "the engine cancelled the prefill")
        if chunk.cached_tokens is not None:
            on_cached(chunk.cached_tokens, chunk.prompt_tokens)
        if chunk.kv_transfer_params is not None:
            params = chunk.kv_transfer_params
        if chunk.finish is not None:
            return params
    raise StreamBroken("the stream ended without a last chunk")


async def open_decode(transport: RequestTransport, address: str, request: EngineRequest) -> SentLeg:
    """Open a decode leg. If the caller is cancelled meanwhile and KV waits at a prefill worker, the leg is
    still opened and then cancelled: often only the decode worker can tell the prefill worker to free it.

    Raises what the transport's ``open`` raises.
    """
    if not request.kv_transfer_params:
        return await transport.open(address, request)
    opening = asyncio.get_running_loop().create_task(transport.open(address, request))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_take_back)
        raise


def _take_back(opening: "asyncio.Task[SentLeg]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().cancel("its client left while it was sent")


def lost_leg(pick: Pick, error: KvrouterError, call: ClientCall | None = None) -> LegLost:
    """Return the journey event for an error that a worker gave for a leg of ``call``. A worker of an older
    version cannot read calls of routes that it does not know: that is no failure of it.
    """
    is_unknown_route = isinstance(error, ProtocolError) and call is not None and call.route.is_passed
    return LegLost(
        pick.leg,
        pick.rank.worker_id,
        error.message,
        answer=error.answer,
        full=isinstance(error, WorkerFull),
        repeated=isinstance(error, LegRepeated | KvNotPulled),
        blameless=is_unknown_route
        or isinstance(error, Unavailable | DeadlineExceeded | ReaderTooSlow | WorkerDeclined),
        shutting_down=isinstance(error, ShuttingDown),
        taken=isinstance(error, StreamBroken | EngineFailed),
    )


async def prefill_outcome(
    placement: Placement, leg: Awaitable[KvTransferParams | None], call: ClientCall | None
) -> PrefillDone | LegLost | LegRefused:
    """Await a prefill leg; return its journey event, without addresses, since clients may read it."""
    pick = placement.prefill_pick
    try:
        params = await leg
    except InvalidRequest as error:
        return LegRefused(error)
    except KvrouterError as error:
        lost = lost_leg(pick, error, call)
        return replace(lost, why=placement.without_addresses(lost.why))
    return PrefillDone(pick.rank.worker_id, params)
