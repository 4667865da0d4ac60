"""TensorRT-LLM's KV events, polled over HTTP: its server hands out each event once."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.engine_events import FIRST_RANK, EngineTraits, Skipped
from kvrouter.engines.kv_events.event_stream import (
    Command,
    EngineEventStream,
    MalformedBatch,
    Missed,
    Publish,
    Restarted,
)
from kvrouter.engines.kv_events.listener import EventListener, OnChange
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import EventsSink
from kvrouter.engines.trtllm.events import NativeEvents, native_batches
from kvrouter.transports.background import spawn

EVENTS = "/kv_cache_events"

POLL_EACH_S = 0.1
"""How long after an answer the engine is asked again; some versions hold the answer back for 2 s."""

POLL_LIMIT_S = 120.0
"""How long an answer may take. Events in an answer that is no longer awaited are lost."""

EVENTS_AT_ONCE = 256
"""After this many events of one answer other tasks run: the first answer may bring all past events."""


@dataclass(frozen=True, slots=True)
class Polled:
    """An engine that is asked for its events, with blocks of ``block_size`` tokens."""

    server: EngineServer
    block_size: int
    poll_each_s: float = POLL_EACH_S

    def listeners(self, on_events: EventsSink, on_change: OnChange) -> tuple[EventListener, ...]:
        """Return the only one that may ask."""
        return (
            PollingListener(
                self.server,
                self.block_size,
                on_events=on_events,
                on_change=on_change,
                poll_each_s=self.poll_each_s,
            ),
        )


class PollingListener:
    """Asks from :meth:`start` to :meth:`stop`.

    An engine's first event reports its new cache: until it comes, earlier events may have gone to another
    client. A repeated id is of another start of the engine; after a broken answer the next one shows that
    events are missing. Events of ranks other than the first are dropped: its server cannot be asked for a
    rank.
    """

    def __init__(
        self,
        server: EngineServer,
        block_size: int,
        *,
        on_events: EventsSink,
        on_change: OnChange,
        poll_each_s: float = POLL_EACH_S,
    ) -> None:
        self._server = server
        self._native = NativeEvents(block_size)
        self._traits = EngineTraits(block_size=block_size)
        self._follower = self._new_follower()
        self._on_events = on_events
        self._on_change = on_change
        self._poll_each_s = poll_each_s
        self._last_id = -1
        self._was_partial = False
        self._is_deaf = False
        self._has_other_ranks = False
        self._task: asyncio.Task[None] | None = None

    lookahead_tokens = 0
    """Its hashes cover their own blocks alone."""

    @property
    def is_partial(self) -> bool:
        """Whether events were missed, or may have been."""
        return self._is_deaf or self._last_id < 0 or bool(self._follower.partial_ranks)

    def skipped(self, dp_rank: DpRank) -> Mapping[Skipped, int]:
        """Return the counts of skipped events of a rank since its engine began."""
        return self._follower.skipped(dp_rank)

    def start(self) -> None:
        """Begin to ask."""
        self._task = spawn(self._poll(), name=f"KV events of {self._server.url}")
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """Ask no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _poll(self) -> None:
        while True:
            try:
                async with asyncio.timeout(POLL_LIMIT_S):
                    answer = await self._server.ask(EVENTS, b"")
                await self._hear(answer)
            except InvalidRequest as error:
                self._end(f"it cannot be asked for KV events: {error.message}")
                return
            except ProtocolError as error:
                self._on_change(f"what it tells of its KV events cannot be read: {error.message}")
                self._forget()
            except (KvrouterError, TimeoutError):
                pass  # whether it answers at all is reported by the probes
            await asyncio.sleep(self._poll_each_s)

    async def _hear(self, answer: bytes) -> None:
        for n_received, (dp_rank, batch) in enumerate(native_batches(answer), start=1):
            if n_received % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if dp_rank != FIRST_RANK:
                self._tell_of(dp_rank)
                continue
            if batch.seq <= self._last_id:
                self._forget()
                self._do((Restarted(),))
            self._last_id = batch.seq
            self._do(self._follower.on_batch(batch))
        self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        if self.is_partial is self._was_partial:
            return
        self._was_partial = self.is_partial
        if not self.is_partial:
            self._on_change("its whole cache is known again")
        elif self._last_id < 0:
            self._on_change(
                "it tells of no KV events: they need event_buffer_max_size in its kv_cache_config, and "
                "nobody else who asks for them"
            )
        else:
            self._on_change("a block's parent is not known")

    def _tell_of(self, dp_rank: DpRank) -> None:
        if not self._has_other_ranks:
            self._has_other_ranks = True
            self._on_change(f"its rank {dp_rank} is not looked at: its server cannot be asked for a rank")

    def _forget(self) -> None:
        """Forget the held blocks: begin with the next event."""
        self._do(self._follower.on_deaf())
        self._follower = self._new_follower()
        self._last_id = -1

    def _new_follower(self) -> EngineEventStream:
        return EngineEventStream(self._native.decode, self._traits, can_replay=False)

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Publish():
                    self._on_events(command.dp_rank, command.events)
                case Missed():
                    last = "on may be" if command.last_seq is None else f"to {command.last_seq} are"
                    self._on_change(f"KV events from {command.first_seq} {last} lost for good")
                case Restarted():
                    self._on_change("its KV events restarted")
                case MalformedBatch():
                    self._on_change(f"one of its KV events cannot be read: {command.error.message}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._end("its KV events are heard no more: a mistake of ours, which the log shows")

    def _end(self, why: str) -> None:
        self._is_deaf = True
        self._on_change(why)
        self._forget()
