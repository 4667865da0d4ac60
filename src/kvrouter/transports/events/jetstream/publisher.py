"""Publishes workers' batches to a stream: acknowledged, pipelined, in order."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch, KvEvent
from kvrouter.core.ids import WorkerRank
from kvrouter.core.json import decoded
from kvrouter.core.workers import EventSource, EventTransport, LoadReport
from kvrouter.transports.background import spawn
from kvrouter.transports.events.encoding import encode_parts
from kvrouter.transports.events.jetstream.stream import (
    ComponentNames,
    EventStream,
    EventTransportObserver,
    StreamLimits,
)
from kvrouter.transports.events.loads import Drops, LatestLoads, LoadEncoder
from kvrouter.transports.events.subjects import message_auth_of
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES
from kvrouter.transports.nats_client import CLIENT_ERRORS, reason

QUEUE_BATCHES_MAX = 8192
"""Unsent batches, over all ranks of the process."""

IN_FLIGHT_MAX = 256
"""Messages in flight: sent and not acknowledged."""

MERGED_EVENTS_MAX = 1024
"""Waiting batches of one rank are merged up to this many events."""

ACK_TIMEOUT_S = 2.0
"""Time without an acknowledgement after which a message and all later ones are sent again."""

TRIES_MAX = 5
"""Sends without an acknowledgement after which a message is dropped."""

RETRY_S = 0.25
"""Pause between two attempts to create the stream, and between two checks of a lost connection."""

ENVELOPE_BYTES = 512
"""Bytes of NATS's largest message that are not available to the payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherLimits:
    """The limits of a publisher; the constants that are the defaults explain them."""

    queue_batches_max: int = QUEUE_BATCHES_MAX
    in_flight_max: int = IN_FLIGHT_MAX
    merged_events_max: int = MERGED_EVENTS_MAX
    ack_timeout_s: float = ACK_TIMEOUT_S


PUBLISHER_LIMITS = PublisherLimits()
"""The default limits of a publisher."""


@dataclass(slots=True)
class _Sent:
    """A sent message without an acknowledgement."""

    subject: str
    payload: bytes
    sent_s: float
    tries: int = 1


class UnackedMessages:
    """Sent messages without an acknowledgement, in order.

    ``wake`` is set when one was acknowledged, and when the stream is gone.
    """

    def __init__(
        self, client: Client, wake: asyncio.Event, drops: Drops, observer: EventTransportObserver
    ) -> None:
        self.has_stream = False
        """Whether the stream exists, as far as known."""
        self._client = client
        self._wake = wake
        self._drops = drops
        self._observer = observer
        self._messages: dict[int, _Sent] = {}
        self._n_sent = 0
        self._inbox = client.new_inbox()
        self._acks: Subscription | None = None
        self._reconnects = 0
        self._refusal = ""

    def __len__(self) -> int:
        return len(self._messages)

    async def listen(self) -> None:
        """Subscribe to the inbox of the acknowledgements, once."""
        if self._acks is None:
            self._acks = await self._client.subscribe(f"{self._inbox}.*", cb=self._on_ack)

    async def close(self) -> None:
        """Unsubscribe from the acknowledgements."""
        if self._acks is not None and not self._client.is_closed:
            acks, self._acks = self._acks, None
            await acks.unsubscribe()

    async def send(self, messages: Sequence[_Sent]) -> None:
        """Send in order. All messages are registered first, so that none is lost when sending fails."""
        numbered = {self._n_sent + at: sent for at, sent in enumerate(messages, start=1)}
        self._n_sent += len(numbered)
        self._messages |= numbered
        for number, sent in numbered.items():
            await self._send(number, sent)

    def is_overdue(self, now_s: float, timeout_s: float) -> bool:
        """Whether the oldest message timed out, or was sent over an earlier connection."""
        oldest = next(iter(self._messages.values()), None)
        if oldest is None:
            return False
        is_elsewhere = self._client.stats["reconnects"] != self._reconnects
        return is_elsewhere or now_s - oldest.sent_s > timeout_s

    async def send_again(self, now_s: float) -> None:
        """Send all messages again, in order; drop those that were sent too often."""
        self._reconnects = self._client.stats["reconnects"]
        for number, sent in list(self._messages.items()):
            if sent.tries >= TRIES_MAX:
                del self._messages[number]
                self._drops.add(1, self._refusal or "NATS did not acknowledge it")
                continue
            sent.tries += 1
            sent.sent_s = now_s
            await self._send(number, sent)

    async def _send(self, number: int, sent: _Sent) -> None:
        await self._client.publish(sent.subject, sent.payload, reply=f"{self._inbox}.{number}")

    async def _on_ack(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        if message.headers is not None and message.headers.get(api.Header.STATUS) is not None:
            self.has_stream = False  # no stream has the subject
            self._wake.set()
            return
        try:
            ack = decoded(_ack, message.data, "acknowledgement")
        except ProtocolError as error:
            self._observer.refused(error.message)
            return
        if ack.error is not None:
            self._refusal = ack.error.description
            return  # it is sent again
        if self._messages.pop(int(number), None) is not None:
            self._wake.set()


class JetStreamPublisher:
    """Publishes for every worker of one component in this process, on one event loop.

    Waiting batches of a rank are merged. Unacknowledged messages are sent again, in order, so that a short
    outage of the broker loses nothing, and routers drop duplicates. A full queue drops the batch and counts
    it: routers notice the gap. Loads bypass the stream: only the newest matters.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        component: str,
        token: str,
        stream_limits: StreamLimits | None = None,
        observer: EventTransportObserver,
        limits: PublisherLimits = PUBLISHER_LIMITS,
    ) -> None:
        self._client = client
        self._names = ComponentNames(namespace, component)
        self._auth = message_auth_of(token, namespace)
        self._load_encoder = LoadEncoder(self._auth, namespace=namespace, component=component)
        self._stream = EventStream(client.jetstream(), self._names, stream_limits or StreamLimits())
        self._observer = observer
        self._drops = Drops(observer.dropped)
        self._limits = limits
        self._waiting: dict[WorkerRank, list[KvBatch]] = {}
        self._n_waiting = 0
        self._loads: dict[WorkerRank, LoadReport] = {}
        self._latest_loads = LatestLoads(self._queue_load)
        self._wake = asyncio.Event()
        self._unacked = UnackedMessages(client, self._wake, self._drops, observer)
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_over = False

    @property
    def source(self) -> EventSource:
        """Return the event source for a card: routers find the stream by namespace and component."""
        return EventSource(EventTransport.JETSTREAM)

    @property
    def is_idle(self) -> bool:
        """Whether everything was sent and acknowledged, or dropped."""
        return self._idle.is_set()

    def publish(self, batch: KvBatch) -> None:
        """Queue a batch; never waits."""
        if self._is_closed:
            return
        if self._n_waiting >= self._limits.queue_batches_max:
            self._drops.add(1, "the queue to NATS is full")
            return
        self._waiting.setdefault(batch.rank, []).append(batch)
        self._n_waiting += 1
        self._wake_task()

    def publish_load(self, report: LoadReport) -> None:
        """Send the newest load of a rank, soon."""
        if not self._is_closed:
            self._latest_loads.publish(report)

    async def close(self, *, limit_s: float = 2.0) -> None:
        """Send the queue, for ``limit_s`` at most, and stop; idempotent."""
        self._is_closed = True
        self._latest_loads.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            n_left = self._n_waiting + len(self._unacked)
            self._drops.add(n_left, "the worker ends before NATS took them")
        self._drops.close()
        if self._task is not None:
            self._is_over = True  # a task's cancellation can get lost in the client's own waiting
            self._wake.set()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._unacked.close()

    # The queue

    def _queue_load(self, report: LoadReport) -> None:
        self._loads[report.rank] = report
        self._wake_task()

    def _wake_task(self) -> None:
        self._wake.set()
        self._idle.clear()
        if self._task is None:
            self._task = spawn(self._run(), name="events: publish to the stream")

    def _take(self, now_s: float) -> list[_Sent]:
        """Dequeue the batches of the rank that waits longest; return them as messages."""
        rank = next(iter(self._waiting))
        batches = self._waiting.pop(rank)
        self._n_waiting -= len(batches)
        subject = self._names.events(rank)
        max_bytes = self._client.max_payload - ENVELOPE_BYTES - MESSAGE_AUTH_BYTES
        taken = []
        for batch in merged(batches, events_max=self._limits.merged_events_max):
            for body, _ in encode_parts(batch, max_bytes=max_bytes):
                if len(body) > max_bytes:
                    self._drops.add(1, f"an event of {len(body)} bytes is too large for NATS")
                    continue
                taken.append(_Sent(subject, self._auth.seal(subject, body), now_s))
        return taken

    # Sending

    async def _run(self) -> None:
        while not self._is_over:
            try:
                await self._prepare()
                await self._send()
            except CLIENT_ERRORS as error:
                if self._client.is_closed:
                    return
                self._observer.disturbed(self._names.component, f"publishing: {reason(error)}")
            await asyncio.sleep(RETRY_S)

    async def _prepare(self) -> None:
        """Create the stream and the inbox where they are missing."""
        await self._unacked.listen()
        if not self._unacked.has_stream:
            await self._stream.ensure()
            self._unacked.has_stream = True

    async def _send(self) -> None:
        """Send until the connection is lost or the stream is gone."""
        loop, unacked = asyncio.get_running_loop(), self._unacked
        if unacked:
            await unacked.send_again(loop.time())
        while unacked.has_stream and self._client.is_connected and not self._is_over:
            self._wake.clear()
            await self._send_loads()
            while self._waiting and len(unacked) < self._limits.in_flight_max:
                await unacked.send(self._take(loop.time()))
            if not (self._waiting or unacked or self._loads):
                self._idle.set()
            await self._wait()
            if unacked.is_overdue(loop.time(), self._limits.ack_timeout_s):
                await unacked.send_again(loop.time())

    async def _send_loads(self) -> None:
        while self._loads:
            _, report = self._loads.popitem()
            await self._client.publish(*self._load_encoder.seal(report))

    async def _wait(self) -> None:
        """Wait for a batch, a load or an acknowledgement; at most ``RETRY_S`` with messages in flight."""
        if self._wake.is_set():
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(RETRY_S if self._unacked else None):
                await self._wake.wait()
        except TimeoutError:
            return


class _AckError(msgspec.Struct):
    description: str = ""


class _Ack(msgspec.Struct):
    error: _AckError | None = None


_ack = msgspec.json.Decoder(_Ack)


def merged(batches: Sequence[KvBatch], *, events_max: int) -> Iterator[KvBatch]:
    """Yield ``batches`` of one rank, consecutive ones merged up to ``events_max`` events."""
    first: KvBatch | None = None
    events: list[KvEvent] = []
    for batch in batches:
        if first is not None:
            follows = (
                batch.epoch == first.epoch
                and batch.first_event_id == first.first_event_id + len(events)
                and len(events) + len(batch.events) <= events_max
            )
            if follows:
                events.extend(batch.events)
                continue
            yield _with_events(first, events)
        first, events = batch, list(batch.events)
    if first is not None:
        yield _with_events(first, events)


def _with_events(first: KvBatch, events: list[KvEvent]) -> KvBatch:
    if len(events) == len(first.events):
        return first
    return msgspec.structs.replace(first, events=tuple(events))
