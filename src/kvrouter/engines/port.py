"""What an attached engine is to the worker beside it."""

from collections.abc import Callable
from typing import Protocol

from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import LoadReport
from kvrouter.planes.requests.port import EngineStream

EventsSink = Callable[[DpRank, tuple[KvEvent, ...]], None]
LoadSink = Callable[[LoadReport], None]


class Engine(Protocol):
    """An engine that serves legs, tells what its cache does, and reports its load."""

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        """Begin to serve; every store and removal reaches ``on_events`` in order, per rank."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Accept a leg and return its stream."""

    def snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        """The blocks that the rank holds now, as stores with parents first."""

    async def stop(self) -> None:
        """Stop serving; open streams break."""
