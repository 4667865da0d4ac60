"""How SGLang's server is asked."""

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.engines.openai.engine import EngineCall, Look
from kvrouter.engines.openai.server import EngineServer
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
        """Return how SGLang is asked for a leg."""
        return call_of(request, n_ranks=self._facts.dp_size)

    async def look(self, server: EngineServer) -> Look:
        """Ask for its loads."""
        try:
            loads = await ask_loads(server, self._worker_id, self._facts.block_size)
            if self._started is None:
                self._started = (await ask_facts(server)).started
        except WorkerUnreachable:
            self._started = None
            raise
        return Look(loads, self._started)
