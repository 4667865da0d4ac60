"""How vLLM's server is asked."""

from collections.abc import Mapping

from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.engines.openai.engine import EngineCall, Look
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.calls import call_of
from kvrouter.engines.vllm.facts import STARTED_METRIC, RankFacts, started_of
from kvrouter.engines.vllm.loads import LOAD_METRICS, load_reports
from kvrouter.planes.requests.port import WorkerUnreachable


class VllmWays:
    """``model`` is the engine's own name for what it serves."""

    def __init__(self, worker_id: WorkerId, *, model: str, ranks: Mapping[DpRank, RankFacts]) -> None:
        self._worker_id = worker_id
        self._model = model
        self._ranks = ranks

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how vLLM is asked for a leg."""
        return call_of(request, model=self._model, n_ranks=len(self._ranks))

    async def look(self, server: EngineServer) -> Look:
        """Read its metrics page."""
        page = await server.look("/metrics")
        if page is None:
            raise WorkerUnreachable(f"{server.url} has no /metrics any more: is it another server?")
        samples = read_metrics(page, (*LOAD_METRICS, STARTED_METRIC))
        return Look(tuple(load_reports(samples, self._ranks, self._worker_id)), started_of(samples))
