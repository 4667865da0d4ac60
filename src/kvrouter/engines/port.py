"""The port of an engine: the interface that a worker uses."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import LoadReport
from kvrouter.transports.requests.port import EngineStream


class EngineState(NamedTuple):
    """The state of the engine that a worker is attached to.

    ``answers``: its server does. ``knows_cache``: every store and removal since it began was received;
    otherwise the known blocks are a lower bound. ``lookahead_tokens``: how many tokens behind a block a
    prompt must have, too, for the engine to find it. ``several_engines``: its URL is an address behind which
    several engines answer. ``start`` distinguishes two starts of it; None when unknown. ``why``
    is the change, for a log line.
    """

    answers: bool = True
    knows_cache: bool = True
    lookahead_tokens: int = 0
    several_engines: bool = False
    start: str | None = None
    why: str = ""


EventsSink = Callable[[DpRank, tuple[KvEvent, ...]], None]
LoadSink = Callable[[LoadReport], None]
StateSink = Callable[[EngineState], None]


class Engine(Protocol):
    """An engine that serves legs, publishes what its cache does, and reports its load."""

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        """Begin to serve; every store and removal reaches ``on_events`` in order, per rank."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Accept a leg and return its stream."""

    async def stop(self) -> None:
        """Stop serving; open streams break."""


@runtime_checkable
class SnapshotEngine(Engine, Protocol):
    """An engine that can list its blocks. For other engines the worker keeps an account of their events."""

    def snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        """The blocks that the rank holds now, as stores with parents first."""

    def held_blocks(self, dp_rank: DpRank) -> int | None:
        """How many blocks the rank holds now; None while that is unknown."""


@runtime_checkable
class WatchedEngine(Engine, Protocol):
    """An engine in another process: it may stop answering, and answer again."""

    def watch(self, on_state: StateSink) -> None:
        """Notify ``on_state`` of every change, from :meth:`start` on."""
