"""How TensorRT-LLM's server is asked."""

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.engines.openai.engine import EngineCall, Look, another_engine
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.trtllm.calls import call_of
from kvrouter.engines.trtllm.facts import (
    ANSWERS_AT_ONCE,
    HEALTH,
    SHARED_IDS,
    TrtllmFacts,
    ask_name,
)
from kvrouter.engines.trtllm.loads import ask_fetched, ask_iteration
from kvrouter.planes.requests.port import WorkerUnreachable

IDLE_AFTER_LOOKS = 2
"""After so many looks in which the engine ran nothing it counts as idle: one iteration may take long."""


RANK = DpRank(0)
"""Its server cannot be asked for one of several ranks: they are one to whoever routes."""


class TrtllmWays:
    """``block_size`` is what its worker's card says; with ``fetches_kv`` it is asked what KV it has fetched.
    Nothing here tells two starts apart; the engine's events do. After a look that failed it is asked for its
    model's name anew.
    """

    def __init__(
        self, worker_id: WorkerId, facts: TrtllmFacts, *, block_size: int, fetches_kv: bool = False
    ) -> None:
        self._rank = WorkerRank(worker_id, RANK)
        self._facts = facts
        self._block_size = block_size
        self._has_shared_ids = facts.is_from(SHARED_IDS)
        self._tells_load = facts.is_from(ANSWERS_AT_ONCE)
        self._fetches_kv = fetches_kv
        self._fetched: KvTransfers | None = None
        self._last: LoadReport | None = None
        self._looks_without = 0
        self._is_known = True

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how TensorRT-LLM is asked for a leg."""
        return call_of(request, has_shared_ids=self._has_shared_ids)

    async def look(self, server: EngineServer) -> Look:
        """Ask whether it is well, and for its load."""
        try:
            if await server.look(HEALTH) is None:
                raise WorkerUnreachable(f"{server.url} has no {HEALTH} any more: is it another server?")
            if not self._is_known:
                await self._check_same(server)
                self._is_known = True
        except WorkerUnreachable:
            self._is_known = False
            raise
        return Look(await self._loads(server) if self._tells_load else ())

    async def _loads(self, server: EngineServer) -> tuple[LoadReport, ...]:
        try:
            if self._fetches_kv:
                self._fetched = await ask_fetched(server, self._fetched)
            iteration = await ask_iteration(server)
        except WorkerUnreachable:
            return ()  # it is well, and too busy to tell
        if iteration is None or iteration.kv_cache_stats is None:
            return self._loads_without()
        cache = iteration.kv_cache_stats
        if cache.tokens_per_block != self._block_size:
            raise another_engine(server.url, "block size", cache.tokens_per_block, self._block_size)
        self._looks_without = 0
        self._last = LoadReport(
            rank=self._rank,
            active_blocks=cache.used_num_blocks,
            total_blocks=cache.max_num_blocks,
            running_requests=iteration.num_active_requests,
            waiting_requests=iteration.num_queued_requests,
            kv_transfers=self._fetched,
        )
        return (self._last,)

    def _loads_without(self) -> tuple[LoadReport, ...]:
        """An engine that runs nothing tells nothing, and holds nothing for a request."""
        self._looks_without += 1
        if self._last is None or self._looks_without < IDLE_AFTER_LOOKS:
            return ()
        return (LoadReport(self._rank, 0, self._last.total_blocks, kv_transfers=self._fetched),)

    async def _check_same(self, server: EngineServer) -> None:
        """Raise WorkerUnreachable for an engine that is not what the worker's card says."""
        _, model = await ask_name(server)
        if model != self._facts.model:
            raise another_engine(server.url, "models", model, self._facts.model)
