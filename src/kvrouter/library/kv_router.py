"""The KV router as an object: pick a worker, or pick and send, with the frontend's decision."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import NamedTuple, Self, TypedDict

import numpy as np

from kvrouter.app.router_build import build_service
from kvrouter.core.constraints import Pin, RoutingConstraints
from kvrouter.core.errors import ConfigError, InvalidRequest, ShuttingDown
from kvrouter.core.events import unpack_hashes
from kvrouter.core.ids import ModelName, RequestId, Slot
from kvrouter.core.requests import GenerateRequest, Leg, Sampling, TokenBuffer
from kvrouter.frontend.openai.parse import pin_of
from kvrouter.kernel.routing.interface import Pick
from kvrouter.library.endpoint_workers import EndpointDiscovery, EndpointWorkers, PairDiscovery
from kvrouter.library.inputs import (
    AnswerPiece,
    AnswerPieces,
    check_length,
    hints_of,
    piece_of,
    pieces_of,
    request_id_of,
    sampling_of,
    token_buffer,
)
from kvrouter.library.runtime import Endpoint, Runtime
from kvrouter.router.bookings import Bookings
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.prefill_dispatch import PrefillDispatch
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Telemetry
from kvrouter.transports.background import spawn


def context_length_of(model_router: ModelRouter, pin: Pin | None) -> int | None:
    """Return the context length in tokens, prompt and answer together: of the pinned worker, else the longest
    of all workers, because routing excludes workers with a shorter context. None without workers.
    """
    card = None if pin is None else model_router.fleet.card(pin.worker_id)
    return model_router.fleet.context_length_tokens if card is None else card.context_length


class PotentialLoad(TypedDict):
    """The load of a worker rank if it took the request."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int


class BestWorker(NamedTuple):
    """A picked worker rank, and how many leading blocks of the prompt it holds."""

    worker_id: int
    dp_rank: int
    overlap_blocks: int


class BestWorkers(NamedTuple):
    """The picked worker ranks of both legs. ``prefill`` is None when one worker serves the whole request,
    ``decode`` when the endpoint's workers only prefill.
    """

    prefill: BestWorker | None
    decode: BestWorker | None

    @property
    def last(self) -> BestWorker:
        """The decode worker, or the prefill worker when only prefill is picked."""
        last = self.decode or self.prefill
        if last is None:
            raise RuntimeError("nobody was picked")
        return last


def _sync_of(runtime: Runtime) -> ReplicaSync:
    sync = runtime.replica_sync()
    if sync is None:
        raise ConfigError(
            "replica_sync: this runtime was connected without: Runtime.connect(settings) with "
            "router.replica_sync connects to NATS for it",
            param="replica_sync",
        )
    return sync


class KvRouter:
    """Routes one endpoint's requests by KV cache and load. Use it as an async context manager.

    Prefill workers of the same namespace make pairs with the endpoint's workers, as at the frontend. Where
    the endpoint's own workers only prefill, only the prefill leg is decided and sent. With a ``block_size`` a
    worker with another one is refused; without, the one that most workers of a model have counts. A refused
    worker is logged, and named in the errors of routing. With ``replica_sync`` the
    routers of the runtime's namespace count each other's requests; ConfigError when the runtime was connected
    without it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int | None = None,
        kv_router_config: KvRouterConfig | None = None,
    ) -> None:
        self._endpoint = endpoint
        runtime, telemetry = endpoint.runtime, Telemetry()
        config = kv_router_config or runtime.router_config
        self._sync = _sync_of(runtime) if config.replica_sync else None
        discovery = PairDiscovery(endpoint, block_size, self._on_alone)
        self._service: RouterService = build_service(
            config,
            request_transport=runtime.requests,
            discovery=discovery,
            subscriber=runtime.events,
            cordons=runtime.cordons,
            telemetry=telemetry,
            links=runtime.links,
            sync=self._sync,
        )
        self._workers = EndpointWorkers(self._service, discovery)
        self._bookings = Bookings()
        self._prefills = PrefillDispatch(
            runtime.requests,
            self._bookings,
            ServiceInstrumentation(telemetry),
            redispatches_max=config.retries_max,
            limit_s=config.request_timeout_s,
        )
        self._starting = asyncio.Lock()
        self._is_started = False
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._close()

    async def start(self) -> None:
        """Begin to follow the workers. Every method that routes calls it first.

        Raises :class:`ShuttingDown` after :meth:`close`.
        """
        self._refuse_when_closed()
        async with self._starting:
            if not self._is_started:
                await self._begin()
                self._is_started = True
                if self._is_closed:  # closed while it started
                    await self._close()
        self._refuse_when_closed()

    async def _begin(self) -> None:
        """Start replica sync and the service; on an error neither keeps running."""
        if self._sync is None:
            await self._service.start()
            return
        await self._sync.start()
        try:
            await self._service.start()
        except BaseException:
            await self._sync.stop()
            raise

    def close(self) -> None:
        """Stop following the workers, free the bookings made by hand, and refuse new requests.

        Answers in progress can be read to their end; prefill legs that still run after their answer are
        cancelled. Idempotent.
        """
        self._is_closed = True
        self._bookings.close()
        self._service.stop()
        has_work = self._sync is not None or len(self._prefills)
        if has_work and self._is_started and self._closing is None:
            self._closing = spawn(self._finish_closing(), name="library: end of a router")

    async def _finish_closing(self) -> None:
        await self._prefills.close()
        if self._sync is not None:
            await self._sync.stop()

    async def _close(self) -> None:
        self.close()
        if self._closing is not None:
            await self._closing

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
        prefill_worker_id: int | None = None,
        prefill_dp_rank: int | None = None,
        routing_constraints: RoutingConstraints | None = None,
        request_id: str | None = None,
    ) -> AnswerPieces:
        """Route and send; return the answer as an async iterator of ``{"token_ids", "finish_reason"}``.

        When the endpoint's workers only prefill, ``worker_id`` is one of them, and the answer is one piece
        that says where the KV is: see :class:`AnswerPiece`.

        Raises :class:`InvalidRequest` for invalid arguments. The first read routes the request and raises
        the errors of routing; later reads raise those of the workers. Leaving the iterator early (``aclose``,
        or the end of ``async with``) cancels the request on the workers and frees its bookings.
        """
        await self.start()
        model_router = self._workers.model(model)
        hints = hints_of(
            constraints=routing_constraints,
            override=router_config_override,
            worker_id=worker_id,
            dp_rank=dp_rank,
            prefill_worker_id=prefill_worker_id,
            prefill_dp_rank=prefill_dp_rank,
        )
        pin = pin_of(hints.worker_id, hints.dp_rank)
        prefill_pin = pin_of(hints.prefill_worker_id, hints.prefill_dp_rank)
        if model_router.placer.settings.prefill_alone and pin is not None:
            if prefill_pin is not None:
                raise InvalidRequest(
                    "prefill_worker_id: worker_id says it already, because this endpoint's workers prefill",
                    param="prefill_worker_id",
                )
            pin, prefill_pin = None, pin
        tokens, sampling = token_buffer(token_ids), sampling_of(stop_conditions, sampling_options)
        request = GenerateRequest(
            request_id=request_id_of(request_id),
            model=model_router.fleet.model,
            token_ids=tokens,
            sampling=sampling,
            constraints=hints.routing_constraints,
            override=hints.router_config_override,
            pin=pin,
            prefill_pin=prefill_pin,
            context_tokens=len(tokens) + sampling.max_tokens,
        )
        _check_length(model_router, request)
        self._bookings.refuse_when_in_use(request.request_id)
        run = self._prefill if model_router.placer.settings.prefill_alone else self._generate
        return AnswerPieces(run(request))

    async def _prefill(self, request: GenerateRequest) -> AsyncGenerator[AnswerPiece, None]:
        self._refuse_when_closed()
        with self._workers.explaining():
            model_router = self._service.model(request.model)
            yield piece_of(await self._prefills.prefill(model_router, request))

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[AnswerPiece, None]:
        self._refuse_when_closed()
        self._bookings.claim(request.request_id)
        try:
            with self._workers.explaining():
                async with self._service.requests.generate(request) as generation:
                    async for piece in pieces_of(generation):
                        yield piece
        finally:
            self._bookings.give_back(request.request_id)

    async def best_worker(
        self,
        token_ids: TokenBuffer | Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
    ) -> BestWorker:
        """Return (worker_id, dp_rank, overlap_blocks) of the worker that would be picked, of a pair
        the decode worker; :meth:`best_workers` returns both.

        With ``request_id`` the request is booked on it: call :meth:`mark_prefill_complete` and :meth:`free`
        for it. Without, nothing changes. Raises :class:`InvalidRequest`, also for an id in use, and
        :class:`RoutingRefused` when no worker may take the request now.
        """
        best = await self.best_workers(token_ids, router_config_override, request_id, model=model)
        return best.last

    async def best_workers(
        self,
        token_ids: TokenBuffer | Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
    ) -> BestWorkers:
        """Return the workers that would be picked for both legs; ``request_id`` books them as one request.

        Raises as :meth:`best_worker` does.
        """
        await self.start()
        model_router = self._workers.model(model)
        tokens = token_buffer(token_ids)
        request = GenerateRequest(
            request_id=request_id_of(request_id),
            model=model_router.fleet.model,
            token_ids=tokens,
            sampling=Sampling(max_tokens=1),
            override=hints_of(override=router_config_override).router_config_override,
            context_tokens=len(tokens) + 1,
        )
        _check_length(model_router, request)
        with self._workers.explaining():
            if request_id is None:
                decision = model_router.explain(request)
            else:
                decision = (await self._bookings.book(model_router, request)).decision
        last = _best(decision.decode)
        if decision.decode.leg is Leg.PREFILL:
            return BestWorkers(last, None)
        return BestWorkers(None if decision.prefill is None else _best(decision.prefill), last)

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
        """Return the load that each rank would have with this prompt, in rank order."""
        await self.start()
        model_router = self._workers.model(model)
        prompt = model_router.hash_prompt(token_buffer(token_ids))
        view = model_router.view(prompt)
        overlap = view.overlap_blocks
        loads: list[PotentialLoad] = []
        for slot in map(Slot, model_router.fleet.rank_order.tolist()):
            rank = model_router.fleet.rank_at(slot)
            card = model_router.fleet.card_at(slot)
            if rank is None or card is None or not self._endpoint.serves(card):
                continue
            cached = 0 if overlap is None else int(overlap[slot]) * model_router.fleet.block_size
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
        """Report the first token of a request that :meth:`best_worker` booked."""
        self._bookings.first_token(RequestId(request_id))

    async def free(self, request_id: str) -> None:
        """Free a booking of :meth:`best_worker`."""
        self._bookings.free(RequestId(request_id))

    async def dump_events(self) -> str:
        """Return the index as JSON: stored blocks by worker rank, each with its engine hash and its sequence
        hash.
        """
        await self.start()
        events = []
        for model_router in self._service.models():
            if isinstance(model_router.cache, EventCacheView):
                for slot, feed in model_router.cache.ingest.feeds():
                    for held in model_router.cache.index.dump(slot):
                        blocks = zip(
                            unpack_hashes(held.engine_hashes),
                            unpack_hashes(held.sequence_hashes),
                            strict=True,
                        )
                        events.append(
                            {
                                "worker_id": feed.rank.worker_id,
                                "dp_rank": feed.rank.dp_rank,
                                "model": model_router.fleet.model,
                                "medium": held.medium.name.lower(),
                                "blocks": [
                                    {"block_hash": engine_hash, "sequence_hash": sequence_hash}
                                    for engine_hash, sequence_hash in blocks
                                ],
                            }
                        )
        return json.dumps(events)

    def _on_alone(self, model: ModelName, is_alone: bool) -> None:
        """Set whether the endpoint's own workers of a model only prefill."""
        model_router = self._service.find(model)
        if model_router is not None:
            model_router.placer.set_prefill_alone(is_alone)

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise ShuttingDown("this KvRouter was closed; make another one")


def _best(pick: Pick) -> BestWorker:
    return BestWorker(pick.rank.worker_id, pick.rank.dp_rank, pick.overlap_blocks)


def _check_length(model_router: ModelRouter, request: GenerateRequest) -> None:
    context_length_tokens = context_length_of(model_router, request.pin)
    if context_length_tokens is not None:
        check_length(
            request.token_ids,
            max_tokens=request.sampling.max_tokens,
            context_length_tokens=context_length_tokens,
        )


class KvIndexer:
    """An index of the blocks that an endpoint's workers hold, without routing; an async context manager.

    ``block_size`` is as in :class:`KvRouter`.
    """

    def __init__(self, endpoint: Endpoint, block_size: int | None = None) -> None:
        runtime, discovery = endpoint.runtime, EndpointDiscovery(endpoint, block_size)
        self._service = build_service(
            KvRouterConfig(),
            request_transport=runtime.requests,
            discovery=discovery,
            subscriber=runtime.events,
            cordons=runtime.cordons,
        )
        self._workers = EndpointWorkers(self._service, discovery)
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._service.start()
        self._is_open = True
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._is_open = False
        self._service.stop()

    async def find_matches_for_request(
        self, token_ids: TokenBuffer | Sequence[int], *, model: str | None = None
    ) -> dict[int, int]:
        """Return worker id → leading blocks held, the best of its ranks; workers without any are absent.

        Raises :class:`ShuttingDown` outside the indexer's context.
        """
        if not self._is_open:
            raise ShuttingDown("this KvIndexer follows no workers: use it inside its `async with`")
        model_router = self._workers.model(model)
        prompt, now_s = model_router.hash_prompt(token_buffer(token_ids)), model_router.clock()
        overlap = model_router.cache.overlap(prompt, model_router.fleet.n_slots, now_s=now_s)
        if overlap is None:
            return {}
        matches: dict[int, int] = {}
        for slot in np.flatnonzero(overlap).tolist():
            rank = model_router.fleet.rank_at(Slot(slot))
            if rank is not None:
                matches[rank.worker_id] = max(matches.get(rank.worker_id, 0), int(overlap[slot]))
        return matches
