"""How SGLang's server is asked."""

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import Role
from kvrouter.engines.openai.engine import EngineCall, Look, another_engine
from kvrouter.engines.openai.server import EngineFailed, EngineServer
from kvrouter.engines.sglang.calls import call_of
from kvrouter.engines.sglang.facts import SglangFacts, ask_facts, ask_loads
from kvrouter.planes.requests.port import WorkerUnreachable


class SglangWays:
    """A start takes this engine longer than a look, so only after a look that failed is it asked which one
    this is: that page is long.
    """

    def __init__(self, worker_id: WorkerId, facts: SglangFacts) -> None:
        self._worker_id = worker_id
        self._facts = facts
        self._started: str | None = facts.started

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how SGLang is asked for a leg. Raises EngineFailed for one without a meeting place in a mode
        of disaggregation: SGLang would refuse it as the client's mistake.
        """
        if self._facts.role is not Role.BOTH and request.bootstrap is None:
            mode = self._facts.role.value
            raise EngineFailed(f"SGLang in {mode} mode takes no request without the other half of a pair")
        return call_of(request, n_ranks=self._facts.dp_size)

    async def look(self, server: EngineServer) -> Look:
        """Ask for its loads."""
        try:
            loads = await ask_loads(server, self._worker_id, self._facts.block_size)
            if self._started is None:
                now = await ask_facts(server)
                self._check_same(now, server.url)
                self._started = now.started
        except WorkerUnreachable:
            self._started = None
            raise
        return Look(loads, self._started)

    def _check_same(self, now: SglangFacts, url: str) -> None:
        """Raise WorkerUnreachable for an engine that is not what the worker's card says."""
        before = self._facts
        if now.model != before.model:
            raise another_engine(url, "models", now.model, before.model)
        if now.block_size != before.block_size:
            raise another_engine(url, "page size", now.block_size, before.block_size)
        if now.dp_size != before.dp_size:
            raise another_engine(url, "ranks", now.dp_size, before.dp_size)
