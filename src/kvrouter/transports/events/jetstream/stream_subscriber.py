"""Subscribes to one component's stream: live batches, and each rank's history before them.

::

    stream   1 ······· S │ S+1 ················ P │ P+1 ······▶
             snapshot ───┘                        │
                         replay of one rank ──────┴─▶ until it has met
                                                  live: every rank but those that replay

The live delivery begins after ``P``. The first recovery of a rank returns the snapshot and replays the rank's
messages after it; a later recovery means that its state is wrong, so the worker is asked.
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
from kvrouter.transports.background import spawn
from kvrouter.transports.events.jetstream.consumer import PushConsumer
from kvrouter.transports.events.jetstream.snapshot_store import (
    Baseline,
    Claim,
    ClaimLost,
    ComponentSnapshots,
    StoredIndex,
)
from kvrouter.transports.events.jetstream.stream import (
    ComponentNames,
    EventStream,
    EventTransportObserver,
    StreamLimits,
)
from kvrouter.transports.events.port import BLOCKS_MAX, BatchSink, LoadSink, RecoveryClient
from kvrouter.transports.events.sinks import OpenedMessages
from kvrouter.transports.message_auth import MessageAuth
from kvrouter.transports.nats_client import CLIENT_ERRORS, reason, subject_name

RETRY_S = 0.5

IDLES_TO_END = 2
"""Heartbeats without a message after which a replay ends: the skipped messages were purged."""


REPLAYS_MAX = 8
"""Ranks that are replayed concurrently."""


@dataclass(slots=True, kw_only=True)
class Replays:
    """The replays of one component, at most one for each rank, and what they share."""

    client: Client
    jetstream: JetStreamContext
    names: ComponentNames
    observer: EventTransportObserver
    heartbeat_s: float
    deliver: Callable[[str, bytes, Epoch], None]
    """Passes a message's batch to the router, if it is of the epoch: (subject, payload, epoch)."""

    check: Callable[["Replay"], Coroutine[None, None, None]]
    """Runs once a replay has caught up with the live delivery."""

    checks: set[asyncio.Task[None]] = field(default_factory=set)
    running: "dict[WorkerRank, Replay]" = field(default_factory=dict)
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REPLAYS_MAX))
    """Limits concurrent reads."""

    def begin(self, rank: WorkerRank, epoch: Epoch, *, after: int) -> None:
        """Replay the rank's messages after the sequence ``after``, in place of an earlier replay."""
        self.cancel(rank)
        self.running[rank] = Replay(rank, epoch, after=after, replays=self)

    def cancel(self, rank: WorkerRank) -> None:
        """Cancel the rank's replay."""
        replay = self.running.pop(rank, None)
        if replay is not None:
            replay.cancel()

    def end(self, replay: "Replay") -> None:
        """End a replay that has caught up with the live delivery."""
        if self.running.get(replay.rank) is replay:
            del self.running[replay.rank]
            check = spawn(self.check(replay), name="events: check a replay")
            self.checks.add(check)
            check.add_done_callback(self.checks.discard)

    async def until_over(self, rank: WorkerRank) -> bool:
        """Wait until the rank is not replayed; return whether it was."""
        replay = self.running.get(rank)
        if replay is not None:
            await replay.over.wait()
        return replay is not None


class Replay:
    """Delivers one rank's messages in the stream, after the sequence ``after``.

    Meanwhile the live delivery skips the rank, and reports the skipped sequences: the replay reads the same
    stream, and ends when it has delivered the last skipped message.
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
        """Set once the replay has ended."""
        self._delivery: PushConsumer | None = None
        self._task = spawn(self._run(), name="events: replay a rank")

    def skipped(self, sequence: int) -> None:
        """Note that the live delivery skipped a message of the rank."""
        self._skipped_to = sequence
        self._idles = 0

    def cancel(self) -> None:
        """Stop the replay."""
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
        self._replays.deliver(subject, payload, self.epoch)
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
"""The longest time to read a snapshot; after that the worker is asked."""


READS_MAX = 3
"""Snapshots that are tried for one rank, when each is replaced while it is read."""

NO_SNAPSHOT = ""
"""The start of a rank with its whole history in the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberContext:
    """The dependencies shared by the subscribers of all components."""

    client: Client
    recovery: RecoveryClient
    namespace: str
    auth: MessageAuth
    replica_name: str
    limits: StreamLimits
    observer: EventTransportObserver
    heartbeat_s: float
    resets: bool
    """Clear the stream and its snapshots before the first subscription."""


class ComponentSubscriber:
    """Subscribes to the events of one component's followed workers. It starts at once, on the event loop."""

    def __init__(
        self, parts: SubscriberContext, component: str, *, on_batch: BatchSink, on_load: LoadSink
    ) -> None:
        self.names = ComponentNames(parts.namespace, component)
        self.position = 0
        """The stream sequence up to which all messages were delivered, except for ranks that replay."""
        self.created = ""
        """Identifies the stream of ``position``; "" before the first subscription."""
        jetstream = parts.client.jetstream()
        self.stream = EventStream(jetstream, self.names, parts.limits)
        self.snapshots = ComponentSnapshots(
            jetstream,
            self.names,
            auth=parts.auth,
            on_refused=parts.observer.refused,
            replicas=parts.limits.replicas,
        )
        self._parts = parts
        self._on_batch = on_batch
        self._on_load = on_load
        observer = parts.observer
        self._opened = OpenedMessages(
            parts.auth, on_malformed=observer.refused, on_foreign=observer.spoke_for_another
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
            deliver=self._deliver_replayed,
            check=self._check_replayed,
        )
        self._is_subscribed = asyncio.Event()
        self._must_reset = parts.resets
        self._live: PushConsumer | None = None
        self._is_closed = False
        self._loads: Subscription | None = None
        self._task = spawn(self._run(), name="events: hear the stream")

    # Followed workers

    def follow(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Follow this incarnation of the worker from now on."""
        if self._followed.get(worker_id) != epoch:
            self.forget(worker_id)
            self._followed[worker_id] = epoch

    def unfollow(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        """Forget this incarnation of the worker; return whether it was followed."""
        if self._followed.get(worker_id) != epoch:
            return False
        self.forget(worker_id)
        return True

    def forget(self, worker_id: WorkerId) -> None:
        """Forget the worker: it is gone, restarted, or is in another component now."""
        self._followed.pop(worker_id, None)
        for rank in [rank for rank in self._began if rank.worker_id == worker_id]:
            del self._began[rank]
            self._replays.cancel(rank)

    def covers(self, rank: WorkerRank) -> bool:
        """Whether all of the rank's messages up to ``position`` were delivered."""
        is_live = rank not in self._replays.running and rank not in self._undecided
        return is_live and rank.worker_id in self._followed

    async def close(self) -> None:
        """Stop all deliveries."""
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

    # Recovery

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """Return the rank's state: from the snapshot at the first call, from its worker at later ones."""
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
        """Return the events ``first`` to ``last`` from the worker; None once a replay has delivered them."""
        if await self._replays.until_over(rank):
            return None
        return await self._parts.recovery.recover_range(rank, first, last)

    async def _stored_answer(self, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """Return the rank's state from the snapshot, or the stream alone; None when they are incomplete."""
        try:
            async with asyncio.timeout(STORED_ANSWER_MAX_S):
                await self._is_subscribed.wait()
                for _ in range(READS_MAX):
                    baseline = await self._stored.baseline()
                    try:
                        snapshot = await self._stored.snapshot(baseline, rank, epoch)
                        if snapshot is None:
                            return await self._begin_from_nothing(rank, epoch)
                        if self._began.get(rank) == baseline.snapshot:
                            return None
                        if await self._is_still_reached(baseline):
                            self._begin(rank, epoch, baseline.snapshot, after=baseline.sequence)
                            return snapshot
                    except NotFoundError:
                        self._stored.forget(baseline)  # its objects were removed
        except (*CLIENT_ERRORS, ProtocolError) as error:
            self._parts.observer.disturbed(self.names.component, f"snapshot: {reason(error)}")
        return None

    async def _begin_from_nothing(self, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """Return the empty state before the rank's first event, if the stream has that event.

        The oldest messages are purged first, so an older message of an earlier incarnation proves that all
        messages of this one are there.
        """
        first = await self.stream.first_of(rank)
        if first is None or self._began.get(rank) is not None:
            return None
        batch = self._opened.batch(self.names.events(rank), first.payload)
        if batch is None or (batch.epoch == epoch and batch.first_event_id > 0):
            return None
        self._begin(rank, epoch, NO_SNAPSHOT, after=first.sequence - 1)
        return KvSnapshot(rank, epoch, EventId(0), ())

    async def _is_still_reached(self, baseline: Baseline) -> bool:
        """Whether the stream has not been purged past ``baseline`` since it was read."""
        reading = await self.stream.read()
        if reading.created == baseline.stream.created and reading.first <= baseline.sequence + 1:
            return True
        self._stored.forget(baseline)
        return False

    def _begin(self, rank: WorkerRank, epoch: Epoch, began: str, *, after: int) -> None:
        """Replay the rank's messages after the sequence ``after``; the caller returns the earlier state."""
        self._began[rank] = began
        self._replays.begin(rank, epoch, after=after)

    # Replays

    def _deliver_replayed(self, subject: str, payload: bytes, epoch: Epoch) -> None:
        batch = self._opened.batch(subject, payload)
        # Ignore messages of other incarnations of the worker.
        if batch is not None and batch.epoch == epoch:
            self._on_batch(batch)

    async def _check_replayed(self, replay: Replay) -> None:
        """Report the rank's next event id when the stream was purged during its replay.

        The rank's feed then notices missed events, and asks again.
        """
        try:
            reading = await self.stream.read()
            if reading.first <= replay.after + 1:
                return
            baseline = await self._stored.baseline()
            if not baseline.is_reached or baseline.sequence < reading.first - 1:
                self._stored.forget(baseline)
                baseline = await self._stored.baseline()
        except (*CLIENT_ERRORS, ProtocolError) as error:
            self._parts.observer.disturbed(self.names.component, f"replay: {reason(error)}")
            return
        held = baseline.ranks.get(replay.rank)
        if held is not None and held.epoch == replay.epoch == self._followed.get(replay.rank.worker_id):
            self._on_batch(KvBatch(replay.rank, held.epoch, held.next_event_id, ()))

    # Live

    async def _run(self) -> None:
        try:
            while not self._has_ended():
                try:
                    why = await self._subscribe_live()
                except (*CLIENT_ERRORS, ProtocolError, ClaimLost) as error:
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

    async def _subscribe_live(self) -> str:
        """Subscribe to the stream until the consumer breaks; return why."""
        if self._loads is None:
            self._loads = await self._parts.client.subscribe(self.names.all_loads, cb=self._load_came)
        reading = await self.stream.ensure()
        if self._must_reset:
            await self._reset()
            reading = await self.stream.read()
        if self.created != reading.created or reading.last < self.position:
            # A recreated stream is read from its beginning; of the first one, replays deliver the history.
            self.position = 0 if self.created else reading.last
            self.created = reading.created
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
            self._is_subscribed.set()
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
        elif batch.rank not in self._undecided:  # else a replay delivers it, or the worker's answer covers it
            self._on_batch(batch)

    async def _load_came(self, message: Msg) -> None:
        report = self._opened.load(message.subject, message.data)
        if report is not None:
            self._on_load(report)
