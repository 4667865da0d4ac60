"""The KV router as an object: pick a worker, or pick and send, with the same decision as the front door's."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self, TypedDict

import msgspec

from kvrouter.assembly import build_service
from kvrouter.config import KvRouterConfig
from kvrouter.core.columns import unpack_hashes
from kvrouter.core.constraints import Pin, RouterConfigOverride, RoutingConstraints
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import DpRank, RequestId, Slot, WorkerId
from kvrouter.core.requests import GenerateRequest, Sampling, TokenBuffer
from kvrouter.library.fleet_of import OfEndpoint, model_of
from kvrouter.library.inputs import Answer, answers, new_request_id, sampling_of, token_buffer
from kvrouter.library.runtime import Endpoint
from kvrouter.service.cache_view import EventCacheView
from kvrouter.service.model_router import ModelRouter
from kvrouter.service.placement import Placement
from kvrouter.service.router import RouterService


class PotentialLoad(TypedDict):
    """What a worker rank's load would be with the request on it."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int


class KvRouter:
    """Routes one endpoint's requests by KV cache and load. Use it as an async context manager.

    Prefill workers of the same namespace make pairs with the endpoint's workers, as at the front door.
    ``block_size`` must be the workers' own: a worker with another one is refused, and logged.
    """

    def __init__(
        self, endpoint: Endpoint, block_size: int, kv_router_config: KvRouterConfig | None = None
    ) -> None:
        self._endpoint = endpoint
        self._block_size = block_size
        runtime = endpoint.runtime
        self._service: RouterService = build_service(
            kv_router_config or KvRouterConfig(),
            plane=runtime.requests,
            discovery=OfEndpoint(endpoint, block_size),
            subscriber=runtime.events,
        )
        self._held: dict[RequestId, tuple[ModelRouter, Placement]] = {}
        self._started = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    async def start(self) -> None:
        """Begin to follow the workers; every method that routes does it when it was not done."""
        if not self._started:
            self._started = True
            await self._service.start()

    def close(self) -> None:
        """Follow the workers no longer; free what was booked by hand."""
        for request_id in list(self._held):
            self._free(request_id)
        self._service.stop()

    async def generate(
        self,
        token_ids: TokenBuffer | Sequence[int],
        model: str | None = None,
        *,
        stop_conditions: Mapping[str, object] | None = None,
        sampling_options: Mapping[str, object] | None = None,
        router_config_override: Mapping[str, object] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        routing_constraints: RoutingConstraints | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[Answer]:
        """Route and send; return the answer as an async iterator of ``{"token_ids", "finish_reason"}``.

        Errors of routing are raised by the first read. Leaving the iterator early (``aclose``) cancels.
        """
        await self.start()
        request = GenerateRequest(
            request_id=RequestId(request_id) if request_id is not None else new_request_id(),
            model=model_of(self._service, model).fleet.model,
            token_ids=token_buffer(token_ids),
            sampling=sampling_of(stop_conditions, sampling_options),
            constraints=routing_constraints or RoutingConstraints(),
            override=_override(router_config_override),
            pin=_pin(worker_id, dp_rank),
        )
        return self._generate(request)

    async def _generate(self, request: GenerateRequest) -> AsyncIterator[Answer]:
        async with self._service.generate(request) as generation:
            async for answer in answers(generation):
                yield answer

    async def best_worker(
        self,
        token_ids: TokenBuffer | Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
    ) -> tuple[int, int, int]:
        """Return (worker_id, dp_rank, overlap_blocks) of the worker that would be picked.

        With ``request_id`` the request is booked there: call :meth:`mark_prefill_complete` and :meth:`free`
        for it. Without, nothing changes.
        """
        await self.start()
        room = model_of(self._service, model)
        wish_id = new_request_id() if request_id is None else RequestId(request_id)
        if wish_id in self._held:
            raise InvalidRequest(
                f"request_id: {wish_id!r} is booked already; free it first", param="request_id"
            )
        request = GenerateRequest(
            request_id=wish_id,
            model=room.fleet.model,
            token_ids=token_buffer(token_ids),
            sampling=Sampling(max_tokens=1),
            override=_override(router_config_override),
        )
        if request_id is None:
            pick = room.explain(request).decode
        else:
            placement = await room.place(request, request.token_ids, attempt=0, excluded=frozenset())
            self._held[wish_id] = (room, placement)
            pick = placement.decision.decode
        return pick.rank.worker_id, pick.rank.dp_rank, pick.overlap_blocks

    async def best_worker_id(
        self,
        token_ids: TokenBuffer | Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        request_id: str | None = None,
    ) -> tuple[int, int]:
        """Deprecated: use :meth:`best_worker`. Return (worker_id, overlap_blocks)."""
        worker_id, _, overlap_blocks = await self.best_worker(token_ids, router_config_override, request_id)
        return worker_id, overlap_blocks

    async def get_potential_loads(
        self, token_ids: TokenBuffer | Sequence[int], *, model: str | None = None
    ) -> list[PotentialLoad]:
        """Return what each rank's load would be with this prompt on it, in the order of ranks."""
        await self.start()
        room = model_of(self._service, model)
        prompt = room.hash_prompt(token_buffer(token_ids))
        view = room.view(prompt)
        overlap = view.overlap_blocks
        loads: list[PotentialLoad] = []
        for slot in map(Slot, room.fleet.rank_order.tolist()):
            rank = room.fleet.rank_at(slot)
            card = room.fleet.card_at(slot)
            if rank is None or card is None or not self._endpoint.serves(card):
                continue
            cached = 0 if overlap is None else int(overlap[slot]) * room.fleet.block_size
            loads.append(
                {
                    "worker_id": rank.worker_id,
                    "dp_rank": rank.dp_rank,
                    "potential_prefill_tokens": int(view.prefill_tokens[slot])
                    + max(0, prompt.isl_tokens - cached),
                    "potential_decode_blocks": int(view.active_blocks[slot])
                    + (prompt.total_blocks if view.not_active is None else int(view.not_active[slot])),
                }
            )
        return loads

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Tell that a request that was booked by hand has its first token."""
        room, placement = self._booked(request_id)
        room.first_token(placement)

    async def free(self, request_id: str) -> None:
        """Give back what was booked by hand."""
        self._booked(request_id)
        self._free(RequestId(request_id))

    async def dump_events(self) -> str:
        """Return what the index holds as JSON: stores by worker rank, each block by its engine's hash and its
        sequence hash.
        """
        events = []
        for room in self._service.models():
            if isinstance(room.cache, EventCacheView):
                for slot, feed in room.cache.pump.feeds():
                    for held in room.cache.index.dump(slot):
                        blocks = zip(
                            unpack_hashes(held.engine_hashes),
                            unpack_hashes(held.sequence_hashes),
                            strict=True,
                        )
                        events.append(
                            {
                                "worker_id": feed.rank.worker_id,
                                "dp_rank": feed.rank.dp_rank,
                                "model": room.fleet.model,
                                "medium": held.medium.name.lower(),
                                "blocks": [
                                    {"block_hash": engine_hash, "sequence_hash": sequence_hash}
                                    for engine_hash, sequence_hash in blocks
                                ],
                            }
                        )
        return json.dumps(events)

    def _booked(self, request_id: str) -> tuple[ModelRouter, Placement]:
        booked = self._held.get(RequestId(request_id))
        if booked is None:
            raise InvalidRequest(f"request_id: {request_id!r} is not booked", param="request_id")
        return booked

    def _free(self, request_id: RequestId) -> None:
        room, placement = self._held.pop(request_id)
        room.release(placement)


def _override(values: Mapping[str, object] | None) -> RouterConfigOverride:
    try:
        return msgspec.convert(dict(values or {}), RouterConfigOverride)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"router_config_override: {error}", param="router_config_override") from None


def _pin(worker_id: int | None, dp_rank: int | None) -> Pin | None:
    if worker_id is None:
        return None
    return Pin(WorkerId(worker_id), None if dp_rank is None else DpRank(dp_rank))
