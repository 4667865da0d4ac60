"""A server that runs already as the engine of the worker beside it: what is alike for all of them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineRequest, Leg
from kvrouter.core.workers import LoadReport
from kvrouter.engines.customs.listener import EngineListener, EventsAt
from kvrouter.engines.customs.telling import Listener, OnChange, Telling
from kvrouter.engines.customs.words import Decode, EngineFacts
from kvrouter.engines.openai.arriving import ArrivingStream
from kvrouter.engines.openai.events import ReadEvent, read_event
from kvrouter.engines.openai.fetching import KV_FAILURES, FetchingStream
from kvrouter.engines.openai.opening import OpeningStream
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.openai.streams import Reading, SseStream, WholeStream
from kvrouter.engines.port import EngineState, EventsSink, LoadSink, StateSink
from kvrouter.planes.requests.port import EngineStream, WorkerUnreachable

LOOK_EACH_S = 1.0
"""How often an engine is looked at: its load, and whether it answers."""

SILENT_AFTER_LOOKS = 3
"""After so many looks without an answer the engine counts as gone."""


def _read_as_openai() -> ReadEvent:
    return read_event


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """What is sent to an engine, and how its answer is read; ``reader`` makes what reads one answer.

    ``answered`` is the whole answer of a call that needs no engine any more: nothing is sent. ``kv_failures``
    is how a decode engine may say that it got no KV.
    """

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    streams: bool
    reading: Reading
    reader: Callable[[], ReadEvent] = _read_as_openai
    answered: bytes | None = None
    kv_failures: tuple[type[KvrouterError], ...] = KV_FAILURES


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine says of itself: its loads, and what tells two of its starts apart, where it does."""

    loads: tuple[LoadReport, ...]
    started: object = None


async def _at_once(answer: bytes) -> bytes:
    return answer


def another_engine(url: str, what: str, now: object, before: object) -> WorkerUnreachable:
    """Return what tells that an engine was started anew as another one than its worker's card describes."""
    return WorkerUnreachable(
        f"{url} was started anew with other {what}: {now}, not {before}: start its worker anew too"
    )


class Ways(Protocol):
    """How one engine is asked."""

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how the engine is asked for a leg. Raises InvalidRequest."""

    async def look(self, server: EngineServer) -> Look:
        """Ask for its load; an error of the core tree for whatever is no answer."""


@dataclass(frozen=True, slots=True)
class Told:
    """An engine that publishes over ZeroMQ: where each rank does, its wire, and the tokens of a block."""

    events_at: Mapping[DpRank, EventsAt]
    decode: Decode
    block_size: int

    def listeners(self, on_events: EventsSink, on_change: OnChange) -> tuple[Listener, ...]:
        """Return one for each rank."""
        return tuple(
            EngineListener(
                at,
                self.decode,
                EngineFacts(block_size=self.block_size, dp_rank=rank),
                on_events=on_events,
                on_change=on_change,
            )
            for rank, at in self.events_at.items()
        )


class ServedEngine:
    """A :class:`~kvrouter.engines.port.WatchedEngine` over an engine's HTTP server."""

    def __init__(
        self,
        server: EngineServer,
        ways: Ways,
        told: Telling,
        *,
        started: object = None,
        look_each_s: float = LOOK_EACH_S,
    ) -> None:
        self._server = server
        self._ways = ways
        self._told = told
        self._look_each_s = look_each_s
        self._listeners: Sequence[Listener] = ()
        self._on_state: StateSink = lambda _: None
        self._looking: asyncio.Task[None] | None = None
        self._started = started
        self._failed_looks = 0

    def watch(self, on_state: StateSink) -> None:
        """Tell ``on_state`` of every change."""
        self._on_state = on_state

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        """Listen to the ranks, and look after the engine."""
        self._listeners = self._told.listeners(on_events, self._tell)
        for listener in self._listeners:
            listener.start()
        self._looking = asyncio.create_task(self._look_after(on_load))

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Send a leg to the engine; what it refuses is raised by the read.

        Raises InvalidRequest for a call that cannot be sent.
        """
        call = self._ways.call_of(request)
        read = call.reader()
        stream: EngineStream
        if call.answered is not None:
            stream = WholeStream(_at_once(call.answered), call.reading, read)
        elif call.streams:
            stream = OpeningStream(self._open(call, read))
        else:
            stream = WholeStream(self._server.ask(call.path, call.body, call.headers), call.reading, read)
        if request.leg is not Leg.DECODE:
            return stream
        if request.kv_transfer_params:
            stream = ArrivingStream(stream)
        fetches_kv = bool(request.kv_transfer_params) or request.bootstrap is not None
        return FetchingStream(stream, call.kv_failures) if fetches_kv else stream

    async def _open(self, call: EngineCall, read: ReadEvent) -> EngineStream:
        return SseStream(await self._server.post(call.path, call.body, call.headers), call.reading, read)

    async def stop(self) -> None:
        """Leave the engine alone; open answers break. Idempotent."""
        for listener in self._listeners:
            listener.stop()
        self._listeners = ()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        await self._server.close()

    async def _look_after(self, on_load: LoadSink) -> None:
        while True:
            try:
                look = await self._ways.look(self._server)
            except KvrouterError as error:
                self._not_heard(error.message)
            except Exception as error:  # noqa: BLE001 - a mistake of ours is shown, and looking goes on
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"{self._server.url}: a look at the engine failed", "exception": error}
                )
                self._not_heard(f"{type(error).__name__}: {error}")
            else:
                self._heard(look)
                for report in look.loads:
                    on_load(replace(report, kv_events_skipped=self._skipped(report.rank.dp_rank)))
            await asyncio.sleep(self._look_each_s)

    def _skipped(self, dp_rank: DpRank) -> Mapping[str, int]:
        skipped = Counter[str]()
        for listener in self._listeners:
            skipped.update({reason.value: n for reason, n in listener.skipped(dp_rank).items()})
        return dict(skipped)

    def _not_heard(self, why: str) -> None:
        self._failed_looks += 1
        if self._failed_looks == SILENT_AFTER_LOOKS:
            self._tell(why)

    def _heard(self, look: Look) -> None:
        was_silent = self._is_silent
        self._failed_looks = 0
        if look.started is not None and look.started != self._started:
            self._started = look.started
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
                knows_cache=not any(listener.is_partial for listener in self._listeners),
                why=why,
            )
        )
