"""The whole decision, through the router that the composition root builds, its fleet and feeds in memory."""

import asyncio
from collections.abc import Callable

import numpy as np

from benchmarks.measure import settle, time_awaits, time_fresh
from benchmarks.ours.workers import EPOCH, QuietWorkers, UnaskedWorker
from benchmarks.side import Facts, Params
from benchmarks.workload import BLOCK_SIZE, HASH_BYTES, DecisionLoad, Tokens
from kvrouter.app.router_build import build_service
from kvrouter.core.events import KvBatch, KvEvent, Stored
from kvrouter.core.hashing import Prompt, block_hashes
from kvrouter.core.ids import (
    DpRank,
    EventId,
    LeaseKey,
    ModelName,
    RequestId,
    RouterId,
    Slot,
    WorkerId,
    WorkerRank,
)
from kvrouter.core.requests import GenerateRequest, Sampling
from kvrouter.core.workers import ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.routing.interface import RouteRequest
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport

MODEL = ModelName("bench")
REQUEST = RequestId("bench")
SAMPLED_PROMPTS = 8

SETTLED_WITHIN_S = 120.0
"""Far above what the largest load takes."""

SAMPLING = Sampling(max_tokens=128)


class Deciding:
    """``decide, list``, ``decide, buffer``, ``decide, book and free, buffer``, from tokens of that form.

    ``decide`` hashes and decides; ``decide, book and free`` is what the service does for a request: it places
    it, counts it, keeps the decision, and releases it.
    """

    def __init__(self, params: Params, config: KvRouterConfig | None = None) -> None:
        self._load = DecisionLoad(**params)
        self._workers = QuietWorkers()
        self._discovery = MemoryDiscovery()
        self._plane = MemoryRequestTransport()
        self._service: RouterService = build_service(
            config or KvRouterConfig(),
            request_transport=self._plane,
            discovery=self._discovery,
            subscriber=self._workers,
        )
        self._next = 0

    async def prepare(self) -> Facts:
        """Workers with empty caches, then their events, then running requests."""
        await self._service.start()
        for worker in range(self._load.n_workers):
            card = _card(worker)
            self._plane.serve(card.address, UnaskedWorker())
            await self._discovery.publish(card)
        await self._until(self._all_live)
        n_blocks = self._publish()
        await self._until(lambda: self._held() == n_blocks)
        self._book()
        settle()
        return {"overlap": self._overlap(), "load": self._loads()}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        first, self._next = self._next, self._next + n_calls

        if variant == "decide, list":
            return time_fresh(lambda i: self._load.prompt(first + i).tolist(), self._decide_list, n_calls)
        if variant == "decide, buffer":
            return time_fresh(lambda i: self._load.prompt(first + i), self._decide_buffer, n_calls)
        if variant == "decide, book and free, buffer":
            return await time_awaits(lambda i: self.request(first + i), self.place_and_release, n_calls)
        raise KeyError(variant)

    async def close(self) -> None:
        self._service.stop()

    @property
    def _model(self) -> ModelRouter:
        return self._service.model(MODEL)

    def _decide_buffer(self, token_ids: Tokens) -> None:
        self._decide(self._model.hash_prompt(token_ids))

    def _decide_list(self, token_ids: list[int]) -> None:
        self._decide(Prompt(token_ids, block_size=BLOCK_SIZE))

    def _decide(self, prompt: Prompt) -> None:
        wish = RouteRequest(REQUEST, isl_tokens=prompt.isl_tokens, total_blocks=prompt.total_blocks)
        self._model.decide(wish, prompt)

    async def place_and_release(self, request: GenerateRequest) -> None:
        """Decide, book, and free what was booked."""
        model = self._model
        placement = await model.place(request, request.token_ids, attempt=0, excluded=frozenset())
        model.release(placement)

    def request(self, number: int) -> GenerateRequest:
        """Return request ``number``."""
        return GenerateRequest(RequestId(f"bench-{number}"), MODEL, self._load.prompt(number), SAMPLING)

    async def _until(self, is_done: Callable[[], bool]) -> None:
        """Wait while the index works through what it was reported, a few blocks in each turn of the loop."""
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while not is_done():  # noqa: ASYNC110 - nothing tells when the index has caught up
                await asyncio.sleep(0.01)

    def _cache(self) -> EventCacheView:
        cache = self._model.cache
        if not isinstance(cache, EventCacheView):
            raise TypeError("the bench decides by KV events")
        return cache

    def _all_live(self) -> bool:
        states = [reading.state for _, reading in self._cache().ingest.feed_readings()]
        return states == [FeedState.LIVE] * self._load.n_workers

    def _held(self) -> list[int]:
        index = self._cache().index
        return [index.held(self._slot(worker)) for worker in range(self._load.n_workers)]

    def _publish(self) -> list[int]:
        """Each worker's blocks, one event a run, through its feed into the index; return how many."""
        prefixes = [
            block_hashes(self._load.prefix(prefix), block_size=BLOCK_SIZE)
            for prefix in range(self._load.n_prefixes)
        ]
        events: list[list[KvEvent]] = [[] for _ in range(self._load.n_workers)]
        for held in self._load.held():
            own = prefixes[held.prompt][: HASH_BYTES * held.n_blocks]
            events[held.worker].append(Stored(None, self._load.names(held), own))
        for run in self._load.others():
            events[run.worker].append(Stored(None, run.engine_hashes, run.block_hashes))
        for worker, stored in enumerate(events):
            rank = WorkerRank(WorkerId(worker), DpRank(0))
            self._workers.publish(KvBatch(rank, EPOCH, EventId(0), tuple(stored)))
        return [sum(event.n_blocks for event in stored if isinstance(event, Stored)) for stored in events]

    def _book(self) -> None:
        ledger, router = self._model.ledger, RouterId("bench")
        ledger.ensure_slots(self._load.n_workers)
        for number, running in enumerate(self._load.running()):
            ledger.book(
                key=LeaseKey(router, RequestId(f"running-{number}"), 0),
                slot=self._slot(running.worker),
                prompt=Prompt(running.tokens, block_size=BLOCK_SIZE),
                prefill_tokens=running.prefill_tokens,
            )

    def _slot(self, worker: int) -> Slot:
        slot = self._model.fleet.slot_of(WorkerRank(WorkerId(worker), DpRank(0)))
        if slot is None:
            raise RuntimeError(f"worker {worker} did not join")
        return slot

    def _overlap(self) -> list[list[int]]:
        slots = [self._slot(worker) for worker in range(self._load.n_workers)]
        found = []
        for number in range(SAMPLED_PROMPTS):
            view = self._model.view(self._model.hash_prompt(self._load.prompt(number)))
            if view.overlap_blocks is None:
                raise RuntimeError("the router keeps no index")
            found.append([int(view.overlap_blocks[slot]) for slot in slots])
        return found

    def _loads(self) -> list[list[int]]:
        columns = self._model.ledger.columns()
        pairs = np.stack([columns.prefill_tokens, columns.active_blocks], axis=1)
        return [[int(count) for count in pairs[self._slot(worker)]] for worker in range(self._load.n_workers)]


def _card(worker: int) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(worker),
        incarnation=EPOCH,
        model=MODEL,
        role=Role.BOTH,
        block_size=BLOCK_SIZE,
        context_length=131_072,
        address=f"memory://{worker}",
        runtime_config=ModelRuntimeConfig(total_kv_blocks=1_000_000, max_num_batched_tokens=8192),
    )
