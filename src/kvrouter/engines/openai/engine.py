"""An engine behind its own HTTP server, as its worker uses it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest, KvrouterError
from kvrouter.core.events import Cleared, KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineRequest, Leg
from kvrouter.core.workers import SEVERAL_ENGINES, LoadReport
from kvrouter.engines.kv_events.engine_events import Decode, EngineTraits
from kvrouter.engines.kv_events.listener import (
    EngineEventSource,
    EngineListener,
    EventListener,
    EventsAt,
    OnChange,
)
from kvrouter.engines.openai.answer_events import ReadEvent, read_event
from kvrouter.engines.openai.engine_starts import EngineStarts
from kvrouter.engines.openai.fetching import KV_FAILURES, READ_WITHIN_S, FetchingStream
from kvrouter.engines.openai.server import (
    JSON_TYPE,
    PROBE_LIMIT_S,
    AnswerHeaders,
    EngineRefuses,
    EngineServer,
)
from kvrouter.engines.openai.sse import AnswerReading
from kvrouter.engines.openai.streams import SseStream, WholeStream
from kvrouter.engines.port import EngineState, EventsSink, LoadSink, StateSink
from kvrouter.transports.requests.port import EngineStream

PROBE_EACH_S = 1.0
"""How often an engine is probed: its load, and whether it answers."""

SILENT_AFTER_PROBES = 3
"""After this many probes without an answer the engine counts as gone."""

REFUSED_PROBES = 3
"""After this many probes in a row with a refused connection, answers without new bytes meanwhile are lost:
that is after 2 s. vLLM closes its port only when its engine has ended, also when it drains
(``--shutdown-timeout``), and may then hold calls open that it never answers."""

REFUSED_PROBES_DRAINING = 31
"""The limit for engines that close their port first and then end their running answers: 30 s, the grace
period of a Kubernetes pod."""


CHECKED_PROBES = range(2, 10)
"""The probes from the start on that are followed by a check whether several engines answer at the URL. The
first is not: an engine that is just attached has been asked enough.
"""

CHECK_EACH_PROBES = 10
"""After how many further probes each check follows."""

CHECK_LIMIT_S = 2.0
"""How long a check may take: no probe goes out meanwhile."""


def _read_as_openai() -> ReadEvent:
    return read_event


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """A call to an engine, and how its answer is read; ``reader`` makes the reader of one answer.

    ``answered`` is the whole answer of a call that needs no engine: it is not sent. ``otherwise`` makes the
    body for an engine that refuses the first one. ``kv_failures`` are the errors by which a decode engine may
    report that it got no KV.
    """

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    streams: bool
    reading: AnswerReading
    reader: Callable[[], ReadEvent] = _read_as_openai
    answered: bytes | None = None
    otherwise: Callable[[], bytes] | None = None
    kv_failures: tuple[type[KvrouterError], ...] = KV_FAILURES


@dataclass(frozen=True, slots=True)
class Probe:
    """An engine's loads, and a value that distinguishes two of its starts, if it has one."""

    loads: tuple[LoadReport, ...]
    started: object = None


AskStart = Callable[[EngineServer], Awaitable[object]]
"""Asks over a new connection which start of an engine answers; None where it does not tell. Raises an error
of the core tree.
"""


async def _at_once(answer: bytes) -> bytes:
    return answer


class EngineClient(Protocol):
    """How one engine is asked."""

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how the engine is asked for a leg. Raises InvalidRequest."""

    async def look(self, server: EngineServer) -> Probe:
        """Ask the engine for its load. Raises an error of the core tree if it does not answer properly."""


@dataclass(frozen=True, slots=True)
class ZmqEvents:
    """An engine that publishes over ZeroMQ: where each rank does, its wire, and the tokens of a block."""

    events_at: Mapping[DpRank, EventsAt]
    decode: Decode
    block_size: int

    def listeners(self, on_events: EventsSink, on_change: OnChange) -> tuple[EventListener, ...]:
        """Return one for each rank."""
        return tuple(
            EngineListener(
                at,
                self.decode,
                EngineTraits(block_size=self.block_size, dp_rank=rank),
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
        client: EngineClient,
        event_source: EngineEventSource,
        *,
        started: object = None,
        ask_start: AskStart | None = None,
        look_each_s: float = PROBE_EACH_S,
        refused_probes: int = REFUSED_PROBES_DRAINING,
    ) -> None:
        self._server = server
        self._client = client
        self._event_source = event_source
        self._look_each_s = look_each_s
        self._listeners: Sequence[EventListener] = ()
        self._on_state: StateSink = lambda _: None
        self._probing: asyncio.Task[None] | None = None
        self._starts = EngineStarts(started)
        self._ask_start = ask_start
        self._n_probes = 0
        self._on_events: EventsSink = lambda *_: None
        self._ranks_heard: set[DpRank] = set()
        self._failed_probes = 0
        self._refused_probes_max = refused_probes
        self._refused_probes = 0
        self._awaiting: WeakSet[SseStream | WholeStream] = WeakSet()
        self._awaited_pieces: dict[SseStream | WholeStream, int] = {}
        """The awaited pieces when the connection of a probe was first refused."""

    def watch(self, on_state: StateSink) -> None:
        """Notify ``on_state`` of every change."""
        self._on_state = on_state

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        """Listen to the ranks, and probe the engine periodically."""
        self._on_events = on_events
        self._listen()
        self._probing = asyncio.create_task(self._probe_periodically(on_load))

    def _listen(self) -> None:
        self._listeners = self._event_source.listeners(self._heard, self._notify)
        for listener in self._listeners:
            listener.start()

    def _heard(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        self._ranks_heard.add(dp_rank)
        self._on_events(dp_rank, events)

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Send a leg to the engine; its refusal is raised by the read.

        Raises InvalidRequest for a call that cannot be sent.
        """
        call = self._client.call_of(request)
        headers = {**request.trace.headers(), **call.headers}
        read = call.reader()
        takes_kv = bool(request.kv_transfer_params)
        answer: SseStream | WholeStream
        if call.answered is not None:
            answer = WholeStream(_at_once(call.answered), call.reading, read)
        elif call.streams:
            sent = self._server.post(call.path, call.body, headers, once=takes_kv)
            answer = SseStream(sent, call.reading, read)
        else:
            answer_headers = AnswerHeaders(JSON_TYPE)
            asked = self._ask(call, headers, answer_headers, once=takes_kv)
            answer = WholeStream(asked, call.reading, read, answer_headers)
        self._awaiting.add(answer)
        if not takes_kv and (request.leg is not Leg.DECODE or request.bootstrap is None):
            return answer
        return FetchingStream(answer, call.kv_failures, read_within_s=READ_WITHIN_S if takes_kv else None)

    async def _ask(
        self, call: EngineCall, headers: Mapping[str, str], answer_headers: AnswerHeaders, *, once: bool
    ) -> bytes:
        try:
            return await self._server.ask(call.path, call.body, headers, answer_headers, once=once)
        except InvalidRequest:
            if call.otherwise is None:
                raise
        return await self._server.ask(call.path, call.otherwise(), headers, answer_headers, once=once)

    async def stop(self) -> None:
        """Leave the engine alone; open answers break. Idempotent."""
        self._stop_listening()
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None
        await self._server.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.stop()
        self._listeners = ()

    async def _probe_periodically(self, on_load: LoadSink) -> None:
        while True:
            try:
                async with asyncio.timeout(PROBE_LIMIT_S):  # however many pages it takes
                    probe = await self._client.look(self._server)
            except TimeoutError:
                self._note_refused(is_refused=False)
                self._probe_failed(f"{self._server.url} does not answer within {PROBE_LIMIT_S:g} s")
            except KvrouterError as error:
                self._note_refused(is_refused=isinstance(error, EngineRefuses))
                self._probe_failed(error.message)
            except Exception as error:  # noqa: BLE001 - a mistake of ours is shown, and probing goes on
                self._report_mistake(error)
                self._probe_failed(f"{type(error).__name__}: {error}")
            else:
                try:
                    self._note_refused(is_refused=False)
                    self._probe_answered(probe)
                    for report in probe.loads:
                        on_load(self._completed(report))
                    await self._check_address()
                except Exception as error:  # noqa: BLE001 - the same, such as no descriptors for listeners
                    self._report_mistake(error)
            await asyncio.sleep(self._look_each_s)

    def _completed(self, report: LoadReport) -> LoadReport:
        """Return a report with the skipped events; the sums of several engines in turn are no sums."""
        carried = None if self._starts.is_several else report.kv_transfers
        skipped = self._skipped(report.rank.dp_rank)
        return replace(report, kv_events_skipped=skipped, kv_transfers=carried)

    async def _check_address(self) -> None:
        """Ask on a new connection which start answers, after the first probes and now and then: probes use a
        kept connection, which an address of several engines leads to one of them.
        """
        self._n_probes += 1
        is_due = self._n_probes in CHECKED_PROBES or self._n_probes % CHECK_EACH_PROBES == 0
        if self._ask_start is None or not is_due:
            return
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                started = await self._ask_start(self._server)
        except (KvrouterError, TimeoutError):
            return  # whether it answers is for the probes to say
        self._note_start(started, is_check=True)

    def _report_mistake(self, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"{self._server.url}: a look at the engine failed", "exception": error}
        )

    def _note_start(self, started: object, *, is_check: bool = False) -> bool:
        """Notify of a restart, and of the first and last sign of several engines; return whether there was
        one. Of several engines only one publishes its KV events to this process, so no cache is known.
        """
        was_several = self._starts.is_several
        if not self._starts.note(started, is_check=is_check):
            return False
        if self._starts.is_several is was_several:
            self._notify("the engine restarted")
        elif was_several:
            try:
                self._listen()
            except Exception:  # such as no descriptors left
                self._stop_listening()
                self._starts.is_several = True  # so the next probe tries again
                raise
            self._notify(f"{self._server.url} is the address of one engine again")
        else:
            self._stop_listening()
            for dp_rank in sorted(self._ranks_heard):
                self._on_events(dp_rank, (Cleared(),))
            self._notify(f"{self._server.url} {SEVERAL_ENGINES}")
        return True

    def _skipped(self, dp_rank: DpRank) -> Mapping[str, int]:
        skipped = Counter[str]()
        for listener in self._listeners:
            skipped.update({reason.value: n for reason, n in listener.skipped(dp_rank).items()})
        return dict(skipped)

    def _note_refused(self, *, is_refused: bool) -> None:
        """Break off the answers without new bytes since the connection of a probe was first refused."""
        if not is_refused:
            self._refused_probes = 0
            self._awaited_pieces.clear()
            return
        self._refused_probes += 1
        awaited = {each: each.awaited_piece for each in self._awaiting}
        if self._refused_probes >= self._refused_probes_max:
            for answer, piece in self._awaited_pieces.items():
                if awaited.get(answer) == piece:
                    answer.break_off("the engine refuses connections, and brings nothing more")
            self._refused_probes = 1
        if self._refused_probes == 1:
            self._awaited_pieces = {each: piece for each, piece in awaited.items() if piece is not None}

    def _probe_failed(self, why: str) -> None:
        self._failed_probes += 1
        if self._failed_probes == SILENT_AFTER_PROBES:
            self._notify(why)

    def _probe_answered(self, probe: Probe) -> None:
        was_silent = self._is_silent
        self._failed_probes = 0
        if not self._note_start(probe.started) and was_silent:
            self._notify("the engine answers again")

    @property
    def _is_silent(self) -> bool:
        return self._failed_probes >= SILENT_AFTER_PROBES

    def _notify(self, why: str) -> None:
        self._on_state(
            EngineState(
                answers=not self._is_silent,
                knows_cache=not (
                    self._starts.is_several or any(listener.is_partial for listener in self._listeners)
                ),
                several_engines=self._starts.is_several,
                start=None if self._starts.last is None else str(self._starts.last),
                lookahead_tokens=max((each.lookahead_tokens for each in self._listeners), default=0),
                why=why,
            )
        )
