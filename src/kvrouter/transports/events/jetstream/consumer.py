"""A push consumer of one stream: in order, without gaps, with the server's flow control."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from kvrouter.core.clock import AwakeClock
from kvrouter.transports.nats_client import CLIENT_ERRORS

HEARTBEAT_S = 2.0
"""How often an idle server sends a heartbeat."""

SILENT_HEARTBEATS = 3
"""Missed heartbeats after which a consumer is dead."""

INACTIVE_S = 300.0
"""The server removes a consumer without a subscriber after this time."""

ACK_EVERY = 256
"""Messages that one acknowledgement covers under load."""

UNACKED_MAX = 1024
"""Unacknowledged messages after which the server pauses: its own flow control counts bytes alone, up to 32 MB
of them, and a small message takes ten times its bytes here.
"""

YIELD_EVERY = 64
"""Messages in a row after which the event loop runs other tasks."""

OnMessage = Callable[[str, bytes, int, int], None]
"""(subject, payload, stream sequence, number of messages pending after this one)"""


@dataclass(frozen=True, slots=True)
class _DeliveryInfo:
    """The position of a message: its stream sequence, its delivery number, and how many follow."""

    stream_sequence: int
    number: int
    pending: int


class PushConsumer:
    """One push consumer. ``position`` is the stream sequence of the last delivered message.

    It acknowledges many messages at once, and at most ``UNACKED_MAX`` wait in this process, whatever the
    length of the stream. With ``durable`` it persists on the server under that name; otherwise the server
    removes it soon after :meth:`close`. Redelivered messages are skipped. When the server is silent, or a
    message is missing, ``broken`` gets the reason: open another consumer after ``position``. ``on_idle`` is
    called for each heartbeat of a server without pending messages.
    """

    def __init__(
        self,
        client: Client,
        jetstream: JetStreamContext,
        on_message: OnMessage,
        *,
        on_idle: Callable[[], None] | None = None,
        stream: str,
        subjects: str,
        heartbeat_s: float,
        durable: str | None = None,
    ) -> None:
        self.position = 0
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._client = client
        self._jetstream = jetstream
        self._on_message = on_message
        self._on_idle = on_idle
        self._stream = stream
        self._subjects = subjects
        self._durable = durable
        self._heartbeat_s = heartbeat_s
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._delivered = 0
        self._acked = 0
        self._ack_subject = ""
        self._received_s = self._checked_s = 0.0
        self._awake = AwakeClock(heartbeat_s)
        self._watch: asyncio.TimerHandle | None = None

    async def open(self, *, after: int) -> int:
        """Deliver the messages after the stream sequence ``after``; return how many there are now.

        Raises what the client raises.
        """
        self.position = after
        inbox = self._client.new_inbox()
        if self._durable is not None:
            with suppress(NotFoundError):  # an earlier one of this name delivers to a closed inbox
                await self._jetstream.delete_consumer(self._stream, self._durable)
        self._subscription = await self._client.subscribe(inbox, cb=self._on_delivery)
        info = await self._jetstream.add_consumer(self._stream, self._config(inbox, after))
        self._consumer = info.name
        self._note_received()
        self._check_silence()
        return info.num_pending or 0

    def stop(self, why: str) -> None:
        """Stop delivering at once; ``broken`` gets the reason."""
        if self._watch is not None:
            self._watch.cancel()
        self._break(why)

    async def close(self) -> None:
        """Stop and unsubscribe; the server keeps a durable consumer for a while."""
        self.stop("closed")
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._client.is_closed:
            return
        try:
            await subscription.unsubscribe()
            if self._durable is None and self._consumer and self._client.is_connected:
                await self._jetstream.delete_consumer(self._stream, self._consumer)
        except CLIENT_ERRORS:
            return  # the server removes it after ``INACTIVE_S``

    def _config(self, inbox: str, after: int) -> api.ConsumerConfig:
        is_durable = self._durable is not None
        return api.ConsumerConfig(
            durable_name=self._durable,
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            filter_subject=self._subjects,
            ack_policy=api.AckPolicy.ALL,
            max_ack_pending=UNACKED_MAX,
            flow_control=True,
            idle_heartbeat=self._heartbeat_s,
            inactive_threshold=INACTIVE_S,
            mem_storage=None if is_durable else True,
        )

    # What the server sends

    async def _on_delivery(self, message: Msg) -> None:
        self._note_received()
        if self.broken.done():
            return
        if message.headers is not None and message.headers.get(api.Header.STATUS) == "100":
            await self._on_control(message, message.headers)
            return
        delivery = _delivery_info(message.reply)
        if delivery is None:
            return  # not from the stream
        if delivery.number != self._delivered + 1:
            self._break(f"delivery {delivery.number} came after {self._delivered}")
            return
        self._delivered = delivery.number
        self._ack_subject = message.reply
        if delivery.stream_sequence > self.position:
            self.position = delivery.stream_sequence
            self._on_message(message.subject, message.data, delivery.stream_sequence, delivery.pending)
        if delivery.pending == 0 or self._delivered - self._acked >= ACK_EVERY:
            await self._ack()
        if self._delivered % YIELD_EVERY == 0:
            await asyncio.sleep(0)

    async def _on_control(self, message: Msg, headers: dict[str, str]) -> None:
        """Answer the server's flow control, and check a heartbeat's delivery count."""
        if message.reply:
            await self._client.publish(message.reply)
            return
        stalled = headers.get(api.Header.CONSUMER_STALLED)
        if stalled:
            await self._client.publish(stalled)
        sent = headers.get(api.Header.LAST_CONSUMER)
        if sent is not None and int(sent) > self._delivered:
            self._break(f"{sent} were sent and {self._delivered} came")
            return
        await self._ack()
        if self._on_idle is not None and not stalled:
            self._on_idle()

    async def _ack(self) -> None:
        if self._acked == self._delivered or not self._client.is_connected:
            return
        self._acked = self._delivered
        await self._client.publish(self._ack_subject, b"+ACK")

    # Liveness of the server

    def _note_received(self) -> None:
        self._received_s = asyncio.get_running_loop().time()

    def _check_silence(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        elapsed_s, self._checked_s = now_s - self._checked_s, now_s
        stood_still = self._awake.advance(elapsed_s)  # then the server's messages are read only after this
        silent_s = now_s - self._received_s
        if silent_s > SILENT_HEARTBEATS * self._heartbeat_s and not stood_still:
            self._break(f"silent for {silent_s:.1f} s")
        else:
            self._watch = loop.call_later(self._heartbeat_s, self._check_silence)

    def _break(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_result(why)


def _delivery_info(reply: str) -> _DeliveryInfo | None:
    """Parse a delivery's reply subject: ``$JS.ACK.`` and, since NATS 2.10, a domain and an account in front
    of stream, consumer, tries, stream sequence, delivery, time and pending. None for a message without.
    """
    tokens = reply.split(".")
    if len(tokens) > 9:
        tokens = tokens[2:]
    try:
        return _DeliveryInfo(int(tokens[5]), int(tokens[6]), int(tokens[8]))
    except (IndexError, ValueError):
        return None
