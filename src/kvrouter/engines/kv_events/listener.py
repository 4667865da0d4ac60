"""A ZeroMQ subscriber to one engine's KV events."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.batches import replay_question
from kvrouter.engines.kv_events.engine_events import Decode, EngineTraits, Skipped
from kvrouter.engines.kv_events.event_stream import (
    AskReplay,
    Command,
    EngineEventStream,
    MalformedBatch,
    Missed,
    Publish,
    Restarted,
)
from kvrouter.engines.port import EventsSink
from kvrouter.transports.background import spawn
from kvrouter.transports.zmq_contexts import end_context

QUEUE_BATCHES_MAX = 100_000
"""How many batches wait in the socket; dropped ones beyond it are asked for again."""

REPLAY_LIMIT_S = 5.0
"""How long the next message of a replay may take."""


@dataclass(frozen=True, slots=True)
class EventsAt:
    """Where one rank publishes its KV events; ``replay`` is None if missed events cannot be asked for."""

    events: str
    replay: str | None = None
    topic: str = ""


class EngineListener:
    """Follows one publisher from :meth:`start` to :meth:`stop`.

    ``on_events`` gets the events of its ranks, ``on_change`` a text on losses, refusals and restarts. After
    an internal error it stops: the loop's exception handler shows the error, and the ranks are emptied, since
    later events are not received.
    """

    def __init__(
        self,
        at: EventsAt,
        decode: Decode,
        traits: EngineTraits,
        *,
        on_events: EventsSink,
        on_change: Callable[[str], None],
        replay_limit_s: float = REPLAY_LIMIT_S,
    ) -> None:
        self._at = at
        self._follower = EngineEventStream(decode, traits, can_replay=at.replay is not None)
        self._on_events = on_events
        self._on_change = on_change
        self._replay_limit_s = replay_limit_s
        self._was_partial = False
        self._lookahead_before = 0
        self._is_deaf = False
        self._context: zmq.asyncio.Context | None = None
        self._sockets: set[zmq.asyncio.Socket] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._replaying: asyncio.Task[None] | None = None

    @property
    def is_partial(self) -> bool:
        """Whether events were missed: more blocks may be held than are known."""
        return self._is_deaf or bool(self._follower.partial_ranks)

    @property
    def lookahead_tokens(self) -> int:
        """How many tokens behind a block a prompt must have, too, to find it."""
        return self._follower.lookahead_tokens

    def skipped(self, dp_rank: DpRank) -> Mapping[Skipped, int]:
        """Return the counts of skipped events of a rank; the publisher's own has those without a rank."""
        return self._follower.skipped(dp_rank)

    def start(self) -> None:
        """Connect, and ask for the batches that the publisher still has."""
        context = self._context = zmq.asyncio.Context()
        live = context.socket(zmq.SUB)
        live.setsockopt(zmq.RCVHWM, QUEUE_BATCHES_MAX)
        monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sockets = {live, monitor}
        live.connect(self._at.events)
        live.subscribe(self._at.topic.encode())
        self._tasks = [
            self._go_on(self._hear(live)),
            self._go_on(self._notice_reconnections(monitor)),
        ]
        self._do(self._follower.start())

    def stop(self) -> None:
        """Listen no more. Idempotent."""
        for task in (*self._tasks, self._replaying):
            if task is not None:
                task.cancel()
        self._tasks, self._replaying = [], None
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
        if self._context is not None:
            end_context(self._context)
            self._context = None

    def _go_on(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = spawn(work, name=f"KV events of {self._at.events}")
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None or self._is_deaf:
            return
        self._is_deaf = True
        self.stop()
        self._on_change("its KV events are heard no more: a mistake of ours, which the log shows")
        self._do(self._follower.on_deaf())

    async def _hear(self, live: zmq.asyncio.Socket) -> None:
        while True:
            self._do(self._follower.on_published(await live.recv_multipart()))

    async def _notice_reconnections(self, monitor: Any) -> None:
        """The first connection is no reconnection."""
        n_connections = 0
        while True:
            parse_monitor_message(await monitor.recv_multipart())
            n_connections += 1
            if n_connections > 1:
                self._do(self._follower.on_reconnected())

    async def _replay(self, context: zmq.asyncio.Context, address: str, start_seq: int) -> None:
        socket = context.socket(zmq.DEALER)
        self._sockets.add(socket)
        try:
            socket.connect(address)
            await socket.send_multipart(replay_question(start_seq))
            while self._follower.is_waiting:
                async with asyncio.timeout(self._replay_limit_s):
                    frames = await socket.recv_multipart()
                commands = self._follower.on_replayed(frames)
                self._do(commands)
                if any(isinstance(command, AskReplay) for command in commands):
                    return  # another question: this answer is none any more
        except TimeoutError:
            self._on_change(f"{address} did not answer to a replay within {self._replay_limit_s:g} s")
            self._do(self._follower.on_replay_failed())
        finally:
            self._sockets.discard(socket)
            socket.close(linger=0)

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Publish():
                    self._on_events(command.dp_rank, command.events)
                case AskReplay():
                    self._ask(command.start_seq)
                case Missed():
                    self._on_change(_describe_missed(command))
                case Restarted():
                    self._on_change("its publisher of KV events restarted")
                case MalformedBatch():
                    self._on_change(f"a message of its KV events cannot be read: {command.error.message}")
        if self.lookahead_tokens != self._lookahead_before:
            self._lookahead_before = self.lookahead_tokens
            self._on_change(f"its blocks' hashes cover {self.lookahead_tokens} tokens behind them")
        if self.is_partial is not self._was_partial:
            self._was_partial = self.is_partial
            self._on_change(
                "a block's parent is not known" if self.is_partial else "its whole cache is known again"
            )

    def _ask(self, start_seq: int) -> None:
        if self._context is None or self._at.replay is None:
            return
        before = self._replaying
        self._replaying = self._go_on(self._replay(self._context, self._at.replay, start_seq))
        if before is not None and before is not asyncio.current_task():
            before.cancel()


def _describe_missed(missed: Missed) -> str:
    if missed.last_seq is None:
        return f"KV events from batch {missed.first_seq} on may be lost"
    return f"KV events of the batches {missed.first_seq} to {missed.last_seq} are lost for good"


OnChange = Callable[[str], None]
"""Called with a text on a loss, a refusal or a restart."""


class EventListener(Protocol):
    """Hears one engine's KV events from :meth:`start` to :meth:`stop`."""

    @property
    def is_partial(self) -> bool:
        """Whether events were missed: more blocks may be held than are known."""

    @property
    def lookahead_tokens(self) -> int:
        """How many tokens behind a block a prompt must have, too, to find it."""

    def skipped(self, dp_rank: DpRank) -> Mapping[Skipped, int]:
        """Return the counts of skipped events of a rank since its engine began."""

    def start(self) -> None:
        """Begin; earlier events are asked for if the engine still has them."""

    def stop(self) -> None:
        """Listen no more. Idempotent."""


class EngineEventSource(Protocol):
    """One engine's source of KV events."""

    def listeners(self, on_events: EventsSink, on_change: OnChange) -> Sequence[EventListener]:
        """Return its listeners, not started yet; an empty sequence if it publishes no events."""
