"""A vLLM server as the engine of the worker beside it."""

import asyncio
from collections.abc import Mapping

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.engines.customs.listener import EventsAt
from kvrouter.engines.customs.rank import RankCustoms
from kvrouter.engines.customs.words import EngineFacts
from kvrouter.engines.openai.metrics import Samples, read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.openai.streams import SseStream, WholeStream
from kvrouter.engines.port import EngineState, EventsSink, LoadSink, StateSink
from kvrouter.engines.vllm.calls import call_of
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.facts import STARTED_METRIC, VllmFacts, started_of
from kvrouter.engines.vllm.loads import LOAD_METRICS, load_reports
from kvrouter.planes.requests.port import EngineStream, WorkerUnreachable

LOOK_EACH_S = 1.0
"""How often the engine's metrics are read: its load, and whether it answers."""

SILENT_AFTER_LOOKS = 3
"""After so many looks without an answer the engine counts as gone."""


class VllmEngine:
    """An :class:`~kvrouter.engines.port.WatchedEngine` over the engine's HTTP server.

    ``events`` are the publishers of those ranks that are to be heard. ``model`` is the engine's own name for
    what it serves.
    """

    def __init__(
        self,
        server: EngineServer,
        facts: VllmFacts,
        *,
        worker_id: WorkerId,
        model: str,
        events: Mapping[DpRank, EventsAt],
        look_each_s: float = LOOK_EACH_S,
    ) -> None:
        self._server = server
        self._facts = facts
        self._worker_id = worker_id
        self._model = model
        self._events_at = events
        self._look_each_s = look_each_s
        self._customs: list[RankCustoms] = []
        self._on_state: StateSink = lambda _: None
        self._looking: asyncio.Task[None] | None = None
        self._started_s = facts.started_s
        self._failed_looks = 0

    def watch(self, on_state: StateSink) -> None:
        """Tell ``on_state`` of every change."""
        self._on_state = on_state

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        """Listen to the ranks, and look after the engine."""
        for rank, at in self._events_at.items():
            customs = RankCustoms(
                at,
                decode,
                EngineFacts(block_size=self._facts.block_size, dp_rank=rank),
                on_events=on_events,
                on_lost=self._tell,
            )
            self._customs.append(customs)
            customs.start()
        self._looking = asyncio.create_task(self._look_after(on_load))

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Send a leg to the engine. Raises as :meth:`EngineServer.post` does."""
        call = call_of(request, model=self._model, n_ranks=len(self._facts.ranks))
        if not call.streams:
            return WholeStream(self._server.ask(call.path, call.body, call.headers), call.reading)
        return SseStream(await self._server.post(call.path, call.body, call.headers), call.reading)

    async def stop(self) -> None:
        """Leave the engine alone; open answers break."""
        for customs in self._customs:
            customs.stop()
        self._customs.clear()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        await self._server.close()

    async def _look_after(self, on_load: LoadSink) -> None:
        while True:
            try:
                page = await self._server.look("/metrics")
                samples = read_metrics(page or b"", (*LOAD_METRICS, STARTED_METRIC))
            except (WorkerUnreachable, ProtocolError) as error:
                self._not_heard(error.message)
            else:
                self._heard(samples)
                for report in load_reports(samples, self._facts.ranks, self._worker_id):
                    on_load(report)
            await asyncio.sleep(self._look_each_s)

    def _not_heard(self, why: str) -> None:
        self._failed_looks += 1
        if self._failed_looks == SILENT_AFTER_LOOKS:
            self._tell(why)

    def _heard(self, samples: Samples) -> None:
        was_silent = self._is_silent
        self._failed_looks = 0
        started_s = started_of(samples)
        if started_s != self._started_s:
            self._started_s = started_s
            for customs in self._customs:
                customs.begin_anew()
            self._tell("the engine was started anew")
        elif was_silent:
            self._tell("the engine answers again")

    @property
    def _is_silent(self) -> bool:
        return self._failed_looks >= SILENT_AFTER_LOOKS

    def _tell(self, why: str) -> None:
        self._on_state(
            EngineState(
                answers=not self._is_silent,
                knows_cache=not any(customs.is_partial for customs in self._customs),
                why=why,
            )
        )
