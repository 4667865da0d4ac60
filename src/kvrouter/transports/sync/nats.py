"""Replica sync over NATS: each message is published once, best effort.

Subjects: ``kvrouter.<namespace>.sync.v<version>.all.<from>`` for every router, and
``kvrouter.<namespace>.sync.v<version>.to.<router>.<from>`` for one. The broker's credentials limit who can
subscribe. Every message is sealed and numbered (:mod:`kvrouter.transports.message_auth`): one with a wrong
MAC is dropped undecoded, and so is a replayed one.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import RouterId
from kvrouter.core.json import unpacked
from kvrouter.core.replica_messages import SyncMessage
from kvrouter.transports.background import spawn
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth, ReplayGuard
from kvrouter.transports.nats_client import CLIENT_ERRORS, flush, flush_subscriptions, subject_name
from kvrouter.transports.sync.port import MessageSink

VERSION = 1
"""The protocol version that all routers of a fleet must share; part of every subject."""

MESSAGE_MAX_BYTES = 1024 * 1024
"""The largest message that a router reads or sends."""


def encode_message(message: SyncMessage) -> bytes:
    """Return ``message`` as msgpack."""
    return _encoder.encode(message)


def decode_message(frame: bytes | memoryview) -> SyncMessage:
    """Return the message in ``frame``; raise ProtocolError."""
    if len(frame) > MESSAGE_MAX_BYTES:
        raise ProtocolError(f"message: {len(frame)} bytes are more than {MESSAGE_MAX_BYTES}", param="message")
    return unpacked(_decoder, frame, "message")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[SyncMessage] = msgspec.msgpack.Decoder(SyncMessage)


OUTBOX_MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes that may wait to be sent. Beyond it messages are dropped; other routers notice, and ask."""

INBOX_MAX_MESSAGES: Final = 8_192
INBOX_MAX_BYTES: Final = 64 * 1024 * 1024
"""Limits of unread messages; beyond them the client drops messages, and this router asks."""

FLUSH_LIMIT_S: Final = 1.0
"""How long closing waits for unsent messages."""


class NatsSyncTransport:
    """One router's connection to the others; the owner of the client connects and closes it.

    ``on_refused`` is called for each message that was dropped.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        on_refused: Callable[[str], None] = lambda _why: None,
        outbox_max_bytes: int = OUTBOX_MAX_BYTES,
    ) -> None:
        self._client = client
        self._subject = f"kvrouter.{subject_name(namespace)}.sync.v{VERSION}"
        self._auth = MessageAuth(token, f"sync {VERSION} {namespace}")
        self._numbers = itertools.count(1)
        self._replay_guard = ReplayGuard()
        self._on_refused = on_refused
        self._outbox_max_bytes = outbox_max_bytes
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._outbox_bytes = 0
        self._sender: asyncio.Task[None] | None = None

    def publish(self, message: SyncMessage, *, to: RouterId | None = None) -> bool:
        """Send at the loop's next turn; return False without a connection, or when the outbox is full."""
        if not self._client.is_connected:
            return False
        body = encode_message(message)
        size_bytes = MESSAGE_AUTH_BYTES + len(body)
        size_max_bytes = min(self._client.max_payload, MESSAGE_AUTH_BYTES + MESSAGE_MAX_BYTES)
        if size_bytes > size_max_bytes or self._outbox_bytes + size_bytes > self._outbox_max_bytes:
            return False
        whom = "all" if to is None else f"to.{to}"
        subject = f"{self._subject}.{whom}.{message.router_id}"
        self._outbox.append((subject, self._auth.seal(subject, body, number=next(self._numbers))))
        self._outbox_bytes += size_bytes
        if self._sender is None or self._sender.done():
            self._sender = spawn(self._send(), name="sync: send")
        return True

    async def subscribe(self, router_id: RouterId, on_message: MessageSink) -> Callable[[], Awaitable[None]]:
        """Subscribe to both subjects; raise what the client raises when it is not connected."""
        own = f".{router_id}"

        async def on_frame(frame: Msg) -> None:
            if frame.subject.endswith(own):  # our own messages come back
                return
            message = self._read(frame)
            if message is not None and frame.subject.endswith(f".{message.router_id}"):
                on_message(message)

        subscriptions: list[Subscription] = []

        async def end() -> None:
            try:
                async with asyncio.timeout(FLUSH_LIMIT_S):
                    if self._sender is not None:
                        await self._sender
                    for subscription in subscriptions:
                        await subscription.unsubscribe()
                    await flush(self._client)
            except CLIENT_ERRORS:
                pass  # the connection is gone, and the subscriptions with it

        try:
            for whom in ("all", f"to.{router_id}"):
                subscription = await self._client.subscribe(
                    f"{self._subject}.{whom}.*",
                    cb=on_frame,
                    pending_msgs_limit=INBOX_MAX_MESSAGES,
                    pending_bytes_limit=INBOX_MAX_BYTES,
                )
                subscriptions.append(subscription)
            await flush_subscriptions(self._client)
        except BaseException:
            await end()
            raise
        return end

    def _read(self, frame: Msg) -> SyncMessage | None:
        try:
            number, body = self._auth.numbered(frame.subject, frame.data)
            if not self._replay_guard.takes(frame.subject, number):
                raise ProtocolError("a router's message came again", param="number")
            return decode_message(body)
        except ProtocolError as error:
            self._on_refused(error.message)
            return None

    async def _send(self) -> None:
        while self._outbox:
            subject, frame = self._outbox.popleft()
            self._outbox_bytes -= len(frame)
            try:
                await self._client.publish(subject, frame)
            except CLIENT_ERRORS:
                self._outbox.clear()  # the connection was lost meanwhile: the others notice the gap
                self._outbox_bytes = 0
