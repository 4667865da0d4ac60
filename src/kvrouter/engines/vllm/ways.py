"""How vLLM's server is asked."""

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.engines.openai.engine import EngineCall, Look, another_engine
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.calls import call_of
from kvrouter.engines.vllm.facts import STARTED_METRIC, VllmFacts, ask_facts, started_of
from kvrouter.engines.vllm.loads import LOAD_METRICS, load_reports
from kvrouter.planes.requests.port import WorkerUnreachable


class VllmWays:
    """``model`` is the engine's own name for what it serves. An engine that was started anew as another one
    does not answer, so far as its worker's card goes.
    """

    def __init__(self, worker_id: WorkerId, facts: VllmFacts, *, model: str) -> None:
        self._worker_id = worker_id
        self._facts = facts
        self._model = model
        self._started_s = facts.started_s

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how vLLM is asked for a leg."""
        return call_of(
            request,
            model=self._model,
            n_ranks=len(self._facts.ranks),
            tells_where_kv_waits=self._facts.uses_nixl,
        )

    async def look(self, server: EngineServer) -> Look:
        """Read its metrics page."""
        page = await server.look("/metrics")
        if page is None:
            raise WorkerUnreachable(f"{server.url} has no /metrics any more: is it another server?")
        samples = read_metrics(page, (*LOAD_METRICS, STARTED_METRIC))
        started_s = started_of(samples)
        if started_s is not None and started_s != self._started_s:
            now = await ask_facts(server)
            self._check_same(now, server.url)
            self._facts = now
            self._started_s = started_s
        return Look(tuple(load_reports(samples, self._facts.ranks, self._worker_id)), started_s)

    def _check_same(self, now: VllmFacts, url: str) -> None:
        """Raise WorkerUnreachable for an engine that is not what the worker's card says."""
        before = self._facts
        if self._model not in now.models:
            raise another_engine(url, "models", ", ".join(now.models), self._model)
        if now.block_size != before.block_size:
            raise another_engine(url, "block size", now.block_size, before.block_size)
        if now.ranks.keys() != before.ranks.keys():
            raise another_engine(url, "ranks", sorted(now.ranks), sorted(before.ranks))
