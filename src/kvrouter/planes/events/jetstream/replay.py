"""One rank's past, from the stream, until it meets what is delivered live."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.client import Client
from nats.js import JetStreamContext

from kvrouter.core.ids import Epoch, WorkerRank
from kvrouter.planes.background import go_on
from kvrouter.planes.events.jetstream.delivery import Delivery
from kvrouter.planes.events.jetstream.words import CLIENT_ERRORS, LaneNames, LaneObserver
from kvrouter.planes.nats_reasons import reason

RETRY_S = 0.5

IDLES_TO_END = 2
"""So many heartbeats without a message: what was skipped is not in the stream any more."""


@dataclass(frozen=True, slots=True)
class ReplayParts:
    """What every replay of a lane works with."""

    client: Client
    jetstream: JetStreamContext
    names: LaneNames
    observer: LaneObserver
    limit: asyncio.Semaphore
    """How many read at the same time."""

    heartbeat_s: float
    hand: Callable[[str, bytes, Epoch], None]
    """Hands a message's batch to the router, if it is of the epoch: (subject, payload, epoch)."""

    ended: Callable[["Replay"], None]
    """Called in the moment in which the replay has met the live delivery: that one goes on."""


class Replay:
    """Hands over what the stream has of one rank, from the sequence ``after`` on.

    The live delivery skips the rank meanwhile, and says so: the replay reads the same stream, so it has what
    was skipped too, and ends when it has handed over the last message that was.
    """

    def __init__(self, rank: WorkerRank, epoch: Epoch, *, after: int, parts: ReplayParts) -> None:
        self.rank = rank
        self.epoch = epoch
        self.after = after
        self._parts = parts
        self._position = after
        self._skipped_to = 0
        self._idles = 0
        self.over = asyncio.Event()
        """Set once nothing more is handed over."""
        self._delivery: Delivery | None = None
        self._task = go_on(self._run(), name="events: replay a rank")

    def skipped(self, sequence: int) -> None:
        """The live delivery met a message of the rank and let it go."""
        self._skipped_to = sequence
        self._idles = 0

    def cancel(self) -> None:
        """Hand over nothing any more."""
        self.over.set()
        if self._delivery is not None:
            self._delivery.stop("cancelled")  # a task's cancellation can get lost in the client's own waiting
        self._task.cancel()

    async def _run(self) -> None:
        async with self._parts.limit:
            while not self.over.is_set():
                try:
                    await self._read()
                except CLIENT_ERRORS as error:
                    self._parts.observer.disturbed(self._parts.names.component, f"replay: {reason(error)}")
                    await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        parts = self._parts
        delivery = self._delivery = Delivery(
            parts.client,
            parts.jetstream,
            self._on_message,
            on_idle=self._on_idle,
            stream=parts.names.stream,
            subjects=parts.names.events(self.rank),
            heartbeat_s=parts.heartbeat_s,
        )
        try:
            pending = await delivery.open(after=self._position)
            if pending == 0 and self._skipped_to <= self._position:
                self._end()
            await delivery.broken
        finally:
            await delivery.close()

    def _on_message(self, subject: str, payload: bytes, sequence: int, pending: int) -> None:
        if self.over.is_set():
            return
        self._position = sequence
        self._idles = 0
        self._parts.hand(subject, payload, self.epoch)
        if pending == 0 and sequence >= self._skipped_to:
            self._end()

    def _on_idle(self) -> None:
        self._idles += 1
        if self._idles >= IDLES_TO_END:
            self._end()

    def _end(self) -> None:
        if not self.over.is_set():
            self.over.set()
            if self._delivery is not None:
                self._delivery.stop("it has ended")
            self._parts.ended(self)
