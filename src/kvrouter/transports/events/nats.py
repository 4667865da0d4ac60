"""KV events over NATS Core: a lost batch leaves a gap, and the worker is asked for it."""

import asyncio
from collections import deque
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, LoadReport, WorkerCard
from kvrouter.transports.background import spawn
from kvrouter.transports.events.encoding import encode_parts
from kvrouter.transports.events.loads import REPORT_EVERY_S, Drops, LatestLoads, LoadEncoder
from kvrouter.transports.events.port import (
    DropReason,
    DropSink,
    ForeignSink,
    MalformedSink,
    RecoveryClient,
    foreign,
)
from kvrouter.transports.events.sinks import EventSinks, OpenedMessages
from kvrouter.transports.events.subjects import (
    all_events,
    all_loads,
    events_subject,
    is_of_component,
    message_auth_of,
)
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES
from kvrouter.transports.nats_client import CLIENT_ERRORS, reason
from kvrouter.transports.registered import registered

QUEUE_MAX_BYTES = 16 * 1024 * 1024
"""Bytes of published messages that may wait to be sent."""

UNREAD_MAX_BYTES = 64 * 1024 * 1024
UNREAD_MAX_MESSAGES = 65_536
"""Limits of unread messages in a router; further ones are dropped, and feeds notice the gap."""


class NatsEventPublisher:
    """Publishes for the workers of one component. Create it on the event loop.

    Publishing never waits: while the connection is down, or ``queue_max_bytes`` wait to be sent, events are
    dropped, and ``on_dropped`` is called, once a minute at most.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        component: str,
        token: str,
        on_dropped: DropSink = lambda _n_batches, _why: None,
        queue_max_bytes: int = QUEUE_MAX_BYTES,
        drops_reported_every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._component = component
        self._auth = message_auth_of(token, namespace)
        self._load_encoder = LoadEncoder(self._auth, namespace=namespace, component=component)
        self._queue_max_bytes = queue_max_bytes
        self._drops = Drops(on_dropped, every_s=drops_reported_every_s)
        self._queue: deque[tuple[str, bytes, bool]] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()
        self._loads = LatestLoads(self._send_load)
        self.publish_load = self._loads.publish
        self._sender = spawn(self._send(), name="events: send")

    @property
    def source(self) -> EventSource:
        """Return the event source for a card."""
        return EventSource(EventTransport.NATS)

    def publish(self, batch: KvBatch) -> None:
        """Send a batch, in parts when it exceeds the server's largest message."""
        subject = events_subject(self._namespace, self._component, batch.rank)
        for body, _ in encode_parts(batch, max_bytes=self._client.max_payload - MESSAGE_AUTH_BYTES):
            self._enqueue(subject, self._auth.seal(subject, body), is_batch=True)

    async def close(self) -> None:
        """Stop publishing."""
        self._loads.close()
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        self._drops.close()

    def _send_load(self, report: LoadReport) -> None:
        subject, frame = self._load_encoder.seal(report)
        self._enqueue(subject, frame, is_batch=False)

    def _enqueue(self, subject: str, frame: bytes, *, is_batch: bool) -> None:
        waiting = self._queued_bytes + len(frame)
        why: str | None = None
        if not self._client.is_connected:
            why = "not connected to NATS"
        elif len(frame) > self._client.max_payload:
            why = f"an event of {len(frame)} bytes is too large for NATS"
        elif waiting > self._queue_max_bytes:
            why = "the queue to NATS is full"
        if why is not None:
            self._drop(why, is_batch=is_batch)
            return
        self._queue.append((subject, frame, is_batch))
        self._queued_bytes = waiting
        self._more.set()

    async def _send(self) -> None:
        while True:
            await self._more.wait()
            while self._queue:
                subject, frame, is_batch = self._queue.popleft()
                try:
                    await self._client.publish(subject, frame)
                except CLIENT_ERRORS as error:
                    self._drop(reason(error), is_batch=is_batch)
                self._queued_bytes -= len(frame)
            self._more.clear()

    def _drop(self, why: str, *, is_batch: bool) -> None:
        """Count a dropped batch; dropped loads do not matter."""
        if is_batch:
            self._drops.add(1, why)


class NatsEventSubscriber(EventSinks):
    """Subscribes to the events and load reports of all workers of a namespace. Call :meth:`start` first.

    ``recovery`` asks workers for missed events. ``on_malformed`` is called for an undecodable message or a
    wrong MAC, ``on_foreign`` for a rank of another subject or component. The client resubscribes after a
    broken connection; the worker's next heartbeat reveals missed events.
    """

    def __init__(
        self,
        client: Client,
        recovery: RecoveryClient,
        *,
        namespace: str,
        token: str,
        on_malformed: MalformedSink,
        on_foreign: ForeignSink,
    ) -> None:
        super().__init__()
        self._client = client
        self.recover_range = recovery.recover_range
        self.recover_snapshot = recovery.recover_snapshot
        self._namespace = namespace
        auth = message_auth_of(token, namespace)
        self._opened = OpenedMessages(auth, on_malformed=on_malformed, on_foreign=on_foreign)
        self._on_foreign = on_foreign
        self._subscriptions: list[Subscription] = []
        self._followed: dict[WorkerId, WorkerCard] = {}

    async def start(self) -> None:
        """Subscribe to the workers."""
        for subject, on_message in (
            (all_events(self._namespace), self._on_events),
            (all_loads(self._namespace), self._on_load),
        ):
            self._subscriptions.append(
                await self._client.subscribe(
                    subject,
                    cb=on_message,
                    pending_msgs_limit=UNREAD_MAX_MESSAGES,
                    pending_bytes_limit=UNREAD_MAX_BYTES,
                )
            )

    async def close(self) -> None:
        """Unsubscribe."""
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except CLIENT_ERRORS:
                continue  # the connection is closed, and the subscription with it
        self._subscriptions.clear()
        self._sinks.clear()

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Restrict the worker's messages to its component's subjects; all workers are delivered anyway."""
        return registered(self._followed, card.worker_id, card)

    def _is_of_its_component(self, subject: str, rank: WorkerRank) -> bool:
        """Whether the rank's worker, if followed, is of the subject's component; report it if not."""
        card = self._followed.get(rank.worker_id)
        if card is None or is_of_component(subject, card.component):
            return True
        self._on_foreign(foreign(rank, subject, DropReason.OTHER_COMPONENT))
        return False

    async def _on_events(self, message: Msg) -> None:
        batch = self._opened.batch(message.subject, message.data)
        if batch is not None and self._is_of_its_component(message.subject, batch.rank):
            self._deliver(batch)

    async def _on_load(self, message: Msg) -> None:
        report = self._opened.load(message.subject, message.data)
        if report is not None and self._is_of_its_component(message.subject, report.rank):
            self._deliver_load(report)
