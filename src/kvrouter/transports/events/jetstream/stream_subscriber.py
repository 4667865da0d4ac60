"""Subscribes to one component's stream: live batches, and each rank's history before them.

::

    stream   1 ······· S │ S+1 ················ P │ P+1 ······▶
             snapshot ───┘                        │
                         replay of one rank ──────┴─▶ until it has met
                                                  live: every rank but those that replay

``P`` is where the live delivery began. A rank that is asked for the first time begins with the snapshot and a
replay of its own messages from there on; a rank that asks again can't be trusted, so its worker is asked.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, WorkerId, WorkerRank
from kvrouter.transports.background import go_on
from kvrouter.transports.events.jetstream.consumer import PushConsumer
from kvrouter.transports.events.jetstream.snapshot_store import (
    Claim,
    ComponentSnapshots,
    Overtaken,
    Stage,
    StoredIndex,
)
from kvrouter.transports.events.jetstream.stream import (
    CLIENT_ERRORS,
    EventStream,
    LaneNames,
    LaneObserver,
    StreamLimits,
)
from kvrouter.transports.events.port import BLOCKS_MAX, BatchSink, LoadSink, RecoveryClient
from kvrouter.transports.events.sinks import OpenedMessages
from kvrouter.transports.message_auth import MessageAuth
from kvrouter.transports.nats_client import reason, subject_name

RETRY_S = 0.5

IDLES_TO_END = 2
"""So many heartbeats without a message: what was skipped is not in the stream any more."""


REPLAYS_MAX = 8
"""Ranks that are replayed at the same time."""


@dataclass(slots=True, kw_only=True)
class Replays:
    """The replays of one component's events, at most one of each rank, and what all of them work with."""

    client: Client
    jetstream: JetStreamContext
    names: LaneNames
    observer: LaneObserver
    heartbeat_s: float
    hand: Callable[[str, bytes, Epoch], None]
    """Hands a message's batch to the router, if it is of the epoch: (subject, payload, epoch)."""

    check: Callable[["Replay"], Coroutine[None, None, None]]
    """Runs once a replay has met the live delivery: that one goes on."""

    checks: set[asyncio.Task[None]] = field(default_factory=set)
    running: "dict[WorkerRank, Replay]" = field(default_factory=dict)
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REPLAYS_MAX))
    """How many read at the same time."""

    def begin(self, rank: WorkerRank, epoch: Epoch, *, after: int) -> None:
        """Replay the rank's messages after the sequence ``after``, and nothing that was replayed before."""
        self.cancel(rank)
        self.running[rank] = Replay(rank, epoch, after=after, replays=self)

    def cancel(self, rank: WorkerRank) -> None:
        """Replay nothing of the rank any more."""
        replay = self.running.pop(rank, None)
        if replay is not None:
            replay.cancel()

    def end(self, replay: "Replay") -> None:
        """A replay has met the live delivery."""
        if self.running.get(replay.rank) is replay:
            del self.running[replay.rank]
            check = go_on(self.check(replay), name="events: check a replay")
            self.checks.add(check)
            check.add_done_callback(self.checks.discard)

    async def until_over(self, rank: WorkerRank) -> bool:
        """Return once the rank is not replayed, and whether it was."""
        replay = self.running.get(rank)
        if replay is not None:
            await replay.over.wait()
        return replay is not None


class Replay:
    """Hands over what the stream has of one rank, from the sequence ``after`` on.

    The live delivery skips the rank meanwhile, and says so: the replay reads the same stream, so it has what
    was skipped too, and ends when it has handed over the last message that was.
    """

    def __init__(self, rank: WorkerRank, epoch: Epoch, *, after: int, replays: Replays) -> None:
        self.rank = rank
        self.epoch = epoch
        self.after = after
        self._replays = replays
        self._position = after
        self._skipped_to = 0
        self._idles = 0
        self.over = asyncio.Event()
        """Set once nothing more is handed over."""
        self._delivery: PushConsumer | None = None
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
        async with self._replays.limit:
            while not self.over.is_set():
                try:
                    await self._read()
                except CLIENT_ERRORS as error:
                    self._replays.observer.disturbed(
                        self._replays.names.component, f"replay: {reason(error)}"
                    )
                    await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        parts = self._replays
        delivery = self._delivery = PushConsumer(
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
        self._replays.hand(subject, payload, self.epoch)
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
            self._replays.end(self)


STORED_ANSWER_MAX_S = 3.0
"""A snapshot that takes longer to read is no answer: the worker is asked."""


READS_MAX = 3
"""Snapshots that are tried for one rank, each one replaced while it was read."""

NO_SNAPSHOT = ""
"""What a rank began with whose whole history is in the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParts:
    """What the event transports of all components work with."""

    client: Client
    recovery: RecoveryClient
    namespace: str
    seal: MessageAuth
    replica_name: str
    limits: StreamLimits
    observer: LaneObserver
    heartbeat_s: float
    resets: bool
    """Clear the stream and its snapshots before anything is heard."""


class ComponentLane:
    """Follows the workers of one component. Make it on the event loop: it begins at once."""

    def __init__(self, parts: LaneParts, component: str, *, on_batch: BatchSink, on_load: LoadSink) -> None:
        self.names = LaneNames(parts.namespace, component)
        self.position = 0
        """The stream sequence up to which everything was handed over, but for ranks that replay."""
        self.made = ""
        """Which stream the position is in; "" before the first was heard."""
        jetstream = parts.client.jetstream()
        self.stream = EventStream(jetstream, self.names, parts.limits)
        self.snapshots = ComponentSnapshots(
            jetstream,
            self.names,
            seal=parts.seal,
            on_refused=parts.observer.refused,
            replicas=parts.limits.replicas,
        )
        self._parts = parts
        self._on_batch = on_batch
        self._on_load = on_load
        observer = parts.observer
        self._opened = OpenedMessages(
            parts.seal, on_malformed=observer.refused, on_foreign=observer.spoke_for_another
        )
        self._stored = StoredIndex(self.snapshots, self.stream)
        self._followed: dict[WorkerId, Epoch] = {}
        self._began: dict[WorkerRank, str | None] = {}
        self._undecided: set[WorkerRank] = set()
        self._replays = Replays(
            client=parts.client,
            jetstream=jetstream,
            names=self.names,
            observer=observer,
            heartbeat_s=parts.heartbeat_s,
            hand=self._hand_replayed,
            check=self._check_replayed,
        )
        self._is_heard = asyncio.Event()
        self._must_reset = parts.resets
        self._live: PushConsumer | None = None
        self._is_closed = False
        self._loads: Subscription | None = None
        self._task = go_on(self._run(), name="events: hear the stream")

    # Who is followed

    def follow(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """From now on this start of the worker is meant."""
        if self._followed.get(worker_id) != epoch:
            self.forget(worker_id)
            self._followed[worker_id] = epoch

    def unfollow(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        """Forget this start of the worker; return whether it was the one that is followed."""
        if self._followed.get(worker_id) != epoch:
            return False
        self.forget(worker_id)
        return True

    def forget(self, worker_id: WorkerId) -> None:
        """Forget the worker: it is gone, started again, or is in another component now."""
        self._followed.pop(worker_id, None)
        for rank in [rank for rank in self._began if rank.worker_id == worker_id]:
            del self._began[rank]
            self._replays.cancel(rank)

    def covers(self, rank: WorkerRank) -> bool:
        """Whether all of the rank up to ``position`` was handed over."""
        is_heard = rank not in self._replays.running and rank not in self._undecided
        return is_heard and rank.worker_id in self._followed

    async def close(self) -> None:
        """Hear nothing any more."""
        self._is_closed = True
        if self._live is not None:
            self._live.stop("closed")  # a task's cancellation can get lost in the client's own waiting
        for rank in list(self._replays.running):
            self._replays.cancel(rank)
        self._stored.close()
        tasks = [self._task, *self._replays.checks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What a rank begins with

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """The rank's state: stored, at its first ask; of its worker, at any other."""
        epoch = self._followed[rank.worker_id]
        if rank not in self._began:
            self._began[rank] = None
            self._undecided.add(rank)
            try:
                snapshot = await self._stored_answer(rank, epoch)
            finally:
                self._undecided.discard(rank)
            if snapshot is not None:
                return snapshot
        trouble: Exception | None = None
        try:
            snapshot = await self._parts.recovery.recover_snapshot(rank, blocks_max=blocks_max)
        except (KvrouterError, OSError) as error:
            snapshot, trouble = None, error
        if snapshot is None:
            snapshot = await self._stored_answer(rank, epoch)
        if snapshot is None and trouble is not None:
            raise trouble
        if snapshot is None:
            await self._replays.until_over(rank)
        return snapshot

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last``, of its worker; None once a replay has brought it."""
        if await self._replays.until_over(rank):
            return None
        return await self._parts.recovery.recover_range(rank, first, last)

    async def _stored_answer(self, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """What the snapshot, or the stream alone, says of the rank; None when they don't say all."""
        try:
            async with asyncio.timeout(STORED_ANSWER_MAX_S):
                await self._is_heard.wait()
                for _ in range(READS_MAX):
                    stage = await self._stored.stage()
                    try:
                        snapshot = await self._stored.snapshot(stage, rank, epoch)
                        if snapshot is None:
                            return await self._begin_from_nothing(rank, epoch)
                        if self._began.get(rank) == stage.snapshot:
                            return None
                        if await self._is_still_reached(stage):
                            self._begin(rank, epoch, stage.snapshot, after=stage.sequence)
                            return snapshot
                    except NotFoundError:
                        self._stored.forget(stage)  # its objects are gone
        except (*CLIENT_ERRORS, ProtocolError) as error:
            self._parts.observer.disturbed(self.names.component, f"snapshot: {reason(error)}")
        return None

    async def _begin_from_nothing(self, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """The empty state before the rank's first event, if the stream has that event.

        The oldest messages go first, so a message of an earlier start shows that this one's are all there.
        """
        first = await self.stream.first_of(rank)
        if first is None or self._began.get(rank) is not None:
            return None
        batch = self._opened.batch(self.names.events(rank), first.payload)
        if batch is None or (batch.epoch == epoch and batch.first_event_id > 0):
            return None
        self._begin(rank, epoch, NO_SNAPSHOT, after=first.sequence - 1)
        return KvSnapshot(rank, epoch, EventId(0), ())

    async def _is_still_reached(self, stage: Stage) -> bool:
        """Whether the stream has not been purged past ``stage`` since that was read."""
        reading = await self.stream.read()
        if reading.made == stage.stream.made and reading.first <= stage.sequence + 1:
            return True
        self._stored.forget(stage)
        return False

    def _begin(self, rank: WorkerRank, epoch: Epoch, began: str, *, after: int) -> None:
        """Replay the rank's messages after the sequence ``after``; its state before that is the answer."""
        self._began[rank] = began
        self._replays.begin(rank, epoch, after=after)

    # Replays

    def _hand_replayed(self, subject: str, payload: bytes, epoch: Epoch) -> None:
        batch = self._opened.batch(subject, payload)
        # Messages of an earlier start of the worker say nothing of this one.
        if batch is not None and batch.epoch == epoch:
            self._on_batch(batch)

    async def _check_replayed(self, replay: Replay) -> None:
        """If the stream was purged while it was replayed, report to the rank how far its ids have come.

        Its feed then knows whether it missed something, and asks again.
        """
        try:
            reading = await self.stream.read()
            if reading.first <= replay.after + 1:
                return
            stage = await self._stored.stage()
            if not stage.is_reached or stage.sequence < reading.first - 1:
                self._stored.forget(stage)
                stage = await self._stored.stage()
        except (*CLIENT_ERRORS, ProtocolError) as error:
            self._parts.observer.disturbed(self.names.component, f"replay: {reason(error)}")
            return
        held = stage.ranks.get(replay.rank)
        if held is not None and held.epoch == replay.epoch == self._followed.get(replay.rank.worker_id):
            self._on_batch(KvBatch(replay.rank, held.epoch, held.next_event_id, ()))

    # Live

    async def _run(self) -> None:
        try:
            while not self._has_ended():
                try:
                    why = await self._hear()
                except (*CLIENT_ERRORS, ProtocolError, Overtaken) as error:
                    why = reason(error)
                if self._has_ended():
                    return
                self._parts.observer.disturbed(self.names.component, f"stream: {why}")
                await asyncio.sleep(RETRY_S)
        finally:
            if self._loads is not None and not self._parts.client.is_closed:
                await self._loads.unsubscribe()

    def _has_ended(self) -> bool:
        return self._is_closed or self._parts.client.is_closed

    async def _hear(self) -> str:
        """Hear the stream until that breaks; return why."""
        if self._loads is None:
            self._loads = await self._parts.client.subscribe(self.names.all_loads, cb=self._load_came)
        reading = await self.stream.ensure()
        if self._must_reset:
            await self._reset()
            reading = await self.stream.read()
        if self.made != reading.made or reading.last < self.position:
            # Another stream has the name: all of it is new. Of the first one, replays bring what came before.
            self.position = 0 if self.made else reading.last
            self.made = reading.made
        if self._has_ended():
            return "closed"
        live = self._live = PushConsumer(
            self._parts.client,
            self._replays.jetstream,
            self._on_message,
            stream=self.names.stream,
            subjects=self.names.all_events,
            durable=f"kvrouter-{subject_name(self._parts.replica_name)}",
            heartbeat_s=self._parts.heartbeat_s,
        )
        try:
            await live.open(after=self.position)
            self._is_heard.set()
            return await live.broken
        finally:
            await live.close()

    async def _reset(self) -> None:
        revised = await self.snapshots.claim()
        await self.snapshots.write(Claim(), over=revised.revision)
        await self.stream.purge()
        await self.snapshots.remove(await self.snapshots.objects())
        self._must_reset = False
        self._parts.observer.was_reset(self.names.component)

    def _on_message(self, subject: str, payload: bytes, sequence: int, _pending: int) -> None:
        self.position = sequence
        batch = self._opened.batch(subject, payload)
        if batch is None:
            return
        replay = self._replays.running.get(batch.rank)
        if replay is not None:
            replay.skipped(sequence)
        elif batch.rank not in self._undecided:  # else a replay brings it, or the worker's answer has it
            self._on_batch(batch)

    async def _load_came(self, message: Msg) -> None:
        report = self._opened.load(message.subject, message.data)
        if report is not None:
            self._on_load(report)
