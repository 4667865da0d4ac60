"""A served engine over recorded pages, and all that it tells the worker next to it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.workers import LoadReport
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.engine import REFUSED_PROBES, ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import EngineState, WatchedEngine
from kvrouter.engines.vllm.attach import VllmClient, ask_start
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.introspect import RankInfo, VllmInfo
from tests.testing.engine_recorder import EventRecorder
from tests.testing.engine_requests import MODEL
from tests.testing.scripted_engine import ScriptedEngine
from tests.testing.waits import until

R0 = DpRank(0)
STARTED_S = 1.79528047303e09
"""As in the recorded pages."""

VLLM_INFO = VllmInfo(
    version="0.32.0",
    models=(MODEL,),
    adapters=(),
    root="tiny-model",
    context_length=2048,
    prefix_caching=True,
    ranks={R0: RankInfo(32, 200)},
    events={},
    started_s=STARTED_S,
)


def vllm_client() -> VllmClient:
    """How the engine of the recorded pages is asked."""
    return VllmClient(WorkerId(7), VLLM_INFO, model=MODEL)


METRICS = "/metrics"


@dataclass
class ProbedEngine:
    """An attached engine, and all that it reported."""

    engine: ServedEngine
    heard: EventRecorder = field(default_factory=EventRecorder)
    loads: list[LoadReport] = field(default_factory=list)
    states: list[EngineState] = field(default_factory=list)

    @property
    def state(self) -> EngineState:
        return self.states[-1] if self.states else EngineState()

    async def until(self, **wanted: object) -> None:
        await until(lambda: all(getattr(self.state, name) == value for name, value in wanted.items()))


@asynccontextmanager
async def probed_engine(
    scripted: ScriptedEngine,
    events_at: Mapping[DpRank, EventsAt] | None = None,
    *,
    started: float | None = STARTED_S,
    ways: Any = None,
    refused_probes: int = REFUSED_PROBES,
    url: str | None = None,
    is_checked: bool = False,
) -> AsyncIterator[ProbedEngine]:
    server = EngineServer(url or scripted.url)
    await server.open()
    engine = ServedEngine(
        server,
        ways or vllm_client(),
        ZmqEvents(events_at or {}, decode, 32),
        started=started,
        ask_start=ask_start if is_checked else None,
        look_each_s=0.005,
        refused_probes=refused_probes,
    )
    assert isinstance(engine, WatchedEngine)
    watched = ProbedEngine(engine)
    engine.watch(watched.states.append)
    await engine.start(watched.heard.on_events, watched.loads.append)
    try:
        async with asyncio.timeout(60):
            yield watched
    finally:
        await engine.stop()
        await engine.stop()


async def wait_for_probes(scripted: ScriptedEngine, n: int) -> None:
    """Wait for so many looks more."""
    last = scripted.asked[METRICS] + n
    await until(lambda: scripted.asked[METRICS] >= last)
