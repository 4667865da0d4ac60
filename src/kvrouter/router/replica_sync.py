"""Replica sync: publishes this router's bookings and link speeds to the other routers, and counts the
bookings of others as load.

The kernel's ledger package makes all decisions; this module adds the transport, the clock and the event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from uuid import uuid4

from kvrouter.core.ids import RouterId
from kvrouter.core.replica_messages import Goodbye, StateQuestion, SyncMessage
from kvrouter.kernel.ledger.journal import Journal
from kvrouter.kernel.ledger.replicas import Asks, Counts, Replicas, Replication
from kvrouter.transports.background import spawn
from kvrouter.transports.sync.port import SyncTransport

FLUSH_AFTER_S: Final = 0.001
"""How long a delta waits so that several travel in one message."""

HEARTBEAT_S: Final = 1.0
SILENT_AFTER_S: Final = 5.0
"""A router without a message for this long counts as gone, and its leases are dropped."""

ASK_AGAIN_S: Final = 1.0


class SyncCounts(NamedTuple):
    """The counters of replica sync."""

    others: Counts
    untold: int
    """Leases not published because there were too many."""

    dropped: int
    """Deltas not sent because there were too many; the other routers request the full state instead."""

    unsent: int
    """Messages that the transport did not accept."""


def new_router_id() -> RouterId:
    """Return a new random id, for one start of a router."""
    return RouterId(uuid4().hex)


class ReplicaSync:
    """Replica sync of one router for all of its models. Runs on one event loop."""

    def __init__(
        self,
        transport: SyncTransport,
        router_id: RouterId | None = None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silent_after_s: float = SILENT_AFTER_S,
        ask_again_s: float = ASK_AGAIN_S,
    ) -> None:
        self._transport = transport
        self.router_id = router_id = router_id or new_router_id()
        self._heartbeat_s = heartbeat_s
        self._journal = Journal(router_id, on_pending=self._on_pending)
        self._replicas = Replicas(router_id, silent_after_s=silent_after_s, ask_again_s=ask_again_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[], Awaitable[None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._answer: asyncio.Task[None] | None = None
        self._unanswered: dict[RouterId, None] = {}
        self._unsent = 0

    @property
    def replication(self) -> Replication:
        """The replication through which a model's placer shares its load."""
        return Replication(self._journal, self._replicas)

    def counts(self) -> SyncCounts:
        """Current sizes, and counts since the start."""
        journal = self._journal
        return SyncCounts(self._replicas.counts(), journal.untold, journal.dropped, self._unsent)

    # Life

    async def start(self) -> None:
        """Start to publish and to receive; request the state of all other routers."""
        self._loop = asyncio.get_running_loop()
        try:
            self._end = await self._transport.subscribe(self.router_id, self._on_message)
        except BaseException:
            self._loop = None
            raise
        self._send(StateQuestion(self.router_id))
        self._beat = spawn(self._beat_on(), name="sync: beat")

    async def stop(self) -> None:
        """Announce the departure and drop the leases of other routers; idempotent."""
        end, self._end = self._end, None
        if end is None:
            return
        for task in (self._beat, self._answer):
            if task is not None:
                task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._loop = None
        self._send(Goodbye(self.router_id))
        await end()
        self._replicas.drop_all()

    # Publishing

    def _on_pending(self) -> None:
        if self._loop is not None and self._timer is None:
            self._timer = self._loop.call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for deltas in self._journal.take():
            self._send(deltas)

    async def _beat_on(self) -> None:
        while True:
            for message in self._journal.take_heartbeat():
                self._send(message)
            now_s = self._now_s()
            for update in self._replicas.links.take(now_s=now_s):
                self._send(update)
            self._act(self._replicas.tick(now_s=now_s))
            await asyncio.sleep(self._heartbeat_s)

    def _send(self, message: SyncMessage, to: RouterId | None = None) -> None:
        if not self._transport.publish(message, to=to):
            self._unsent += 1

    # Listening

    def _on_message(self, message: SyncMessage) -> None:
        if self._loop is not None:
            self._act(self._replicas.on_message(message, now_s=self._now_s()))

    def _act(self, asks: Asks) -> None:
        for router_id in asks.ask:
            self._send(StateQuestion(self.router_id), to=router_id)
        for router_id in asks.answer:
            self._unanswered[router_id] = None
        if self._unanswered and (self._answer is None or self._answer.done()):
            self._answer = spawn(self._answer_all(), name="sync: tell all leases")

    async def _answer_all(self) -> None:
        """Send the full state to each router that requested it, one part per turn of the event loop."""
        while self._unanswered:
            router_id = next(iter(self._unanswered))
            del self._unanswered[router_id]
            self._flush()
            for part in self._journal.state():
                self._send(part, to=router_id)
                await asyncio.sleep(0)
            for update in self._replicas.links.state(now_s=self._now_s()):
                self._send(update, to=router_id)
                await asyncio.sleep(0)

    @staticmethod
    def _now_s() -> float:
        return time.monotonic()  # the clock of every placer
