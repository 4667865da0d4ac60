"""The router's end of requests over NATS, and the pipe of a session: sealed, numbered messages."""

import asyncio
import itertools
import math
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.json import unpacked
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.background import spawn, tick
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth, ReplayGuard
from kvrouter.transports.nats_client import CLIENT_ERRORS, subject_name, unsubscribe
from kvrouter.transports.requests.frames import FrameKind, frame
from kvrouter.transports.requests.leg_stream import SessionStream, UnacceptedLegs
from kvrouter.transports.requests.legs import CONNECTION_CLOSED
from kvrouter.transports.requests.port import AliveSink, LivenessListeners, WorkerUnreachable
from kvrouter.transports.requests.session import (
    ROUTER_LIMITS,
    RouterLimits,
    RouterSession,
    Session,
)

VERSION = 2
"""The version of the transport over NATS. Ends of different versions have different subjects and keys."""

SIGNS = frozenset({frame(FrameKind.PING), frame(FrameKind.PONG)})
"""Heartbeat frames. They are not counted, so a lost one does not end the session."""

MESSAGE_MAX_BYTES = 1 << 20
"""The longest message that is sent, even where the server allows longer ones."""

ENVELOPE_BYTES = MESSAGE_AUTH_BYTES + 256
"""Bytes of a message besides the session's: the MAC and the sender."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class FromRouter(msgspec.Struct, frozen=True, array_like=True):
    """A message of a router. ``link`` names its session: the last token of the answers' subject."""

    router: str
    link: int
    n_before: int
    is_sign: bool
    data: bytes


class FromWorker(msgspec.Struct, frozen=True, array_like=True):
    """A message of a worker to one session of a router."""

    worker_id: WorkerId
    incarnation: Epoch
    n_before: int
    is_sign: bool
    data: bytes


def message_auth_of(token: str, namespace: str) -> MessageAuth:
    """Return the authentication of the transport's messages."""
    return MessageAuth(token, f"requests {VERSION} {namespace}")


def from_router(auth: MessageAuth, subject: str, message: bytes) -> tuple[int, FromRouter]:
    """Return a message's number and content, from a router; raise ProtocolError. The MAC is checked first."""
    number, body = auth.numbered(subject, message)
    received = unpacked(_from_router, body, "message")
    if not _NAME.fullmatch(received.router):
        raise ProtocolError(f"{received.router!r} is no router", param="router")
    return number, received


def from_worker(auth: MessageAuth, subject: str, message: bytes) -> tuple[int, FromWorker]:
    """Return a message's number and content, from a worker; raise ProtocolError. The MAC is checked first."""
    number, body = auth.numbered(subject, message)
    return number, unpacked(_from_worker, body, "message")


def requests_subject(namespace: str, worker_id: WorkerId, incarnation: Epoch) -> str:
    """Return the subject to which one incarnation of a worker subscribes."""
    return f"kvrouter.{namespace}.requests.{VERSION}.{worker_id}.{incarnation}"


def answers_subject(namespace: str, router: str, link: int | str) -> str:
    """Return the subject to which a router subscribes."""
    return f"kvrouter.{namespace}.answers.{router}.{link}"


_encoder = msgspec.msgpack.Encoder()
_from_router = msgspec.msgpack.Decoder(FromRouter)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


class NatsPipe:
    """Carries one session: sends numbered messages to one subject, and receives those that come back.

    NATS delivers at most once. Every message has the count of those before it, so that the next one, at the
    latest a heartbeat, reveals a loss, which ends the session. ``replies_to`` receives NATS's notice that
    ``subject`` has no subscriber. The creator of the pipe sets ``session``, and gives it :meth:`wake`.
    """

    session: Session

    def __init__(
        self, publisher: "PipePublisher", subject: str, replies_to: str, speaker: tuple[str | int, int]
    ) -> None:
        self.subject = subject
        self.replies_to = replies_to
        self._publisher = publisher
        self._speaker = speaker
        self._n_sent = 0
        self._n_received = 0

    def wake(self) -> None:
        """Schedule a flush of the session's output."""
        self._publisher.wake(self)

    def receive(self, received: FromRouter | FromWorker) -> None:
        """Pass the other end's message to the session; end the session where a message is missing."""
        if received.n_before != self._n_received:
            self.session.close("a message was lost on the way")
            return
        self._n_received += not received.is_sign
        self.session.receive(received.data)

    def message(self, data: bytes, *, is_sign: bool) -> bytes:
        """Return the body of the next message."""
        body = _encoder.encode((*self._speaker, self._n_sent, is_sign, data))
        self._n_sent += not is_sign
        return body


class PipePublisher:
    """Publishes the output of the sessions of its pipes, in messages of at most NATS's largest size.

    Its messages are numbered from 1, over all pipes.
    """

    def __init__(self, client: Client, auth: MessageAuth) -> None:
        self._client = client
        self._auth = auth
        self._numbers = itertools.count(1)
        self._full: dict[NatsPipe, None] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self, pipe: NatsPipe) -> None:
        """Schedule the output of ``pipe``."""
        self._full[pipe] = None
        self._more.set()
        if self._task is None:
            self._task = spawn(self._run(), name="requests: send messages")

    async def close(self) -> None:
        """Send all pending output, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._send_all()

    async def _run(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._send_all()

    async def _send_all(self) -> None:
        while self._full:
            pipe = next(iter(self._full))
            del self._full[pipe]
            data = pipe.session.take_output()
            piece_bytes = min(self._client.max_payload, MESSAGE_MAX_BYTES) - ENVELOPE_BYTES
            for at in range(0, len(data), piece_bytes):
                await self._send(pipe, data[at : at + piece_bytes], is_sign=data in SIGNS)
                if pipe.session.is_lost:
                    break

    async def _send(self, pipe: NatsPipe, data: bytes, *, is_sign: bool) -> None:
        if is_sign and not self._client.is_connected:
            return  # in an outage heartbeats fill the client's buffer, which then rejects other messages
        body = pipe.message(data, is_sign=is_sign)
        message = self._auth.seal(pipe.subject, body, number=next(self._numbers))
        try:
            await self._client.publish(pipe.subject, message, reply=pipe.replies_to)
        except Exception as error:  # noqa: BLE001 - a message that the client fails on must not block others
            if not is_sign:
                pipe.session.lose(f"NATS: {type(error).__name__}: {error}")


WINDOW_TOKENS = 2048
"""The initial credit of a leg, in tokens."""

NO_RESPONDERS_BEATS = 3
"""Heartbeats in a row without a subscriber after which the worker is lost."""

NATS_DOWN = "the connection to NATS is down"


class RouterPipe(NatsPipe):
    """The pipe of a session with one worker."""

    session: RouterSession[SessionStream]


class NatsLink:
    """The transport's state for one worker: its followers, and at most one session."""

    def __init__(self, address: str, worker: tuple[WorkerId, Epoch], now_s: float) -> None:
        self.address = address
        self.worker = worker
        self.pipe: RouterPipe | None = None
        self.followers = LivenessListeners()
        self.received_s = now_s
        self.used_s = now_s
        self.unanswered_beats = 0

    @property
    def is_used(self) -> bool:
        """Whether the worker has followers or a session."""
        return self.pipe is not None or bool(self.followers)

    def use(self, now_s: float) -> None:
        """Start a use of the link: silence counts from now."""
        if not self.is_used:
            self.received_s = now_s
        self.used_s = now_s
        self.unanswered_beats = 0

    def on_message(self, now_s: float) -> None:
        """Record a message of the worker."""
        self.received_s = now_s
        self.unanswered_beats = 0
        self.followers.notify(is_alive=True)

    def on_no_responders(self, *, was_disconnected: bool) -> None:
        """Handle that the worker's subject has no subscriber.

        The worker may be reconnecting, so open legs break only after several heartbeats in a row without a
        subscriber. Followers are not notified soon after this router itself reconnected: otherwise it alone
        would lose workers that reconnect more slowly.
        """
        if not was_disconnected:
            self.followers.notify(is_alive=False)
        if self.pipe is not None:
            session = self.pipe.session
            session.refuse_unaccepted(f"nobody serves {self.address}")
            if not session.n_streams or self.unanswered_beats >= NO_RESPONDERS_BEATS:
                session.give_up("nobody serves it")

    def beat(self, now_s: float, disconnected_s: float, dead_after_s: float) -> None:
        """Send a heartbeat and check the worker's silence, not counting time in which this router was
        offline.
        """
        if now_s - max(self.received_s, disconnected_s) > dead_after_s:
            self.followers.notify(is_alive=False)
        self.unanswered_beats += 1
        if self.pipe is not None:
            self.pipe.session.tick(now_s)


class NatsRequestTransport:
    """Opens streams to workers at ``nats://<namespace>/<worker id>/<incarnation>``, over a connection that
    its caller opens and closes.

    While the client is disconnected, no leg is opened: the client would send it after the reconnect, too
    late. A long outage of NATS loses silent workers too; a short one that lost no message harms no stream.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        limits: RouterLimits = ROUTER_LIMITS,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._client = client
        self._namespace = subject_name(namespace)
        self._auth = message_auth_of(token, self._namespace)
        self._replay_guard = ReplayGuard()
        self._limits = replace(limits, stream_credit_tokens=WINDOW_TOKENS)
        self._on_refused = on_refused
        self._router = secrets.token_hex(8)
        self._publisher = PipePublisher(client, self._auth)
        self._link_numbers = itertools.count()
        self._links: dict[str, NatsLink] = {}
        self._by_number: dict[int, tuple[NatsLink, RouterPipe]] = {}
        self._listening: asyncio.Task[Subscription] | None = None
        self._clock = AwakeClock(self._limits.heartbeat_s)
        self._beating: asyncio.Task[None] | None = None
        self._unaccepted = UnacceptedLegs(limits.open_timeout_s)
        self._disconnected_s = -math.inf
        self._reconnects = client.stats["reconnects"]
        self._closed = False

    async def open(self, address: str, request: EngineRequest) -> SessionStream:
        """Send ``request``, once answers can arrive. Raises WorkerUnreachable where NATS is not reached."""
        begun_s = time.monotonic()
        link = self._open_link(address)
        if not self._is_listening:
            try:
                async with asyncio.timeout(self._limits.open_timeout_s):
                    await self._listen()
            except TimeoutError:
                raise self._unaccepted.unanswered(address) from None
            if self._closed:
                raise WorkerUnreachable("the plane was closed")
        return self._opened(link, request, begun_s)

    def open_now(self, address: str, request: EngineRequest) -> SessionStream | None:
        """Send ``request``, if answers can arrive. Raises WorkerUnreachable where NATS is not reached."""
        link = self._open_link(address)
        return self._opened(link, request, time.monotonic()) if self._is_listening else None

    def _opened(self, link: NatsLink, request: EngineRequest, begun_s: float) -> SessionStream:
        stream = self._pipe(link).session.open(request, 0)
        self._unaccepted.add(stream, begun_s)
        return stream

    def _open_link(self, address: str) -> NatsLink:
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        if not self._client.is_connected:
            raise WorkerUnreachable(NATS_DOWN)
        return self._link(address)

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Report the liveness of the worker at ``address``; return the function that stops it, idempotent."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        return self._link(address).followers.add(on_alive)

    async def close(self) -> None:
        """Close every session; open streams break."""
        self._closed = True
        for _, pipe in tuple(self._by_number.values()):
            pipe.session.close(CONNECTION_CLOSED)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self._publisher.close()
        if self._listening is not None:
            await unsubscribe(self._listening)

    def _link(self, address: str) -> NatsLink:
        """Return the link to a worker and mark it as used; raise WorkerUnreachable for a foreign address."""
        now_s = self._clock.now_s
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = NatsLink(address, self._worker(address), now_s)
        link.use(now_s)
        if self._beating is None:
            self._beating = spawn(self._beat(), name="requests: look after workers")
        return link

    def _worker(self, address: str) -> tuple[WorkerId, Epoch]:
        namespace, _, worker = address.removeprefix("nats://").partition("/")
        worker_id, _, incarnation = worker.partition("/")
        if namespace != self._namespace or not worker_id.isdecimal() or not incarnation.isdecimal():
            raise WorkerUnreachable(f"{address} is no worker's address on nats://{self._namespace}")
        return WorkerId(int(worker_id)), Epoch(int(incarnation))

    def _pipe(self, link: NatsLink) -> RouterPipe:
        """Return the pipe of the session with a worker; create one where there is none."""
        if link.pipe is not None:
            return link.pipe
        number = next(self._link_numbers)
        answers = answers_subject(self._namespace, self._router, number)
        requests = requests_subject(self._namespace, *link.worker)
        pipe = link.pipe = RouterPipe(self._publisher, requests, answers, (self._router, number))

        def forget(_why: str) -> None:
            link.pipe = None
            del self._by_number[number]

        pipe.session = RouterSession(
            link.address,
            self._limits,
            router_hello=None,
            new_stream=SessionStream,
            wake=pipe.wake,
            is_wanted=lambda: bool(link.followers),
            on_welcome=lambda: None,
            on_end=forget,
            on_refused=self._on_refused,
        )
        self._by_number[number] = (link, pipe)
        return pipe

    @property
    def _is_listening(self) -> bool:
        listening = self._listening
        return listening is not None and listening.done() and listening.exception() is None

    async def _listen(self) -> None:
        """Subscribe to the answers, once. Raises WorkerUnreachable when the client fails."""
        if self._listening is None or (self._listening.done() and self._listening.exception() is not None):
            subject = answers_subject(self._namespace, self._router, "*")
            self._listening = asyncio.create_task(self._client.subscribe(subject, cb=self._on_message))
        try:
            await asyncio.shield(self._listening)
        except CLIENT_ERRORS as error:
            raise WorkerUnreachable(f"NATS: {error}") from error

    async def _on_message(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        known = self._by_number.get(int(number)) if number.isdecimal() else None
        if known is None:
            return
        link, pipe = known
        if message.headers is not None and message.headers.get("Status") == "503":
            self._note_disconnection()
            link.on_no_responders(
                was_disconnected=self._clock.now_s - self._disconnected_s <= self._limits.dead_after_s
            )
            return
        try:
            sent, received = from_worker(self._auth, message.subject, message.data)
        except ProtocolError as error:
            self._on_refused(error.message)
            return
        if (received.worker_id, received.incarnation) != link.worker:
            return
        if self._replay_guard.takes(message.subject, sent):
            link.on_message(self._clock.now_s)
            pipe.receive(received)
        else:
            self._on_refused("a worker's message came again")

    async def _beat(self) -> None:
        """Send heartbeats, and check which workers are alive."""
        while not self._client.is_closed:
            self._note_disconnection()
            if self._client.is_connected:
                with suppress(WorkerUnreachable):
                    await self._listen()
            else:  # let waiting requests be sent elsewhere at once
                for _, pipe in tuple(self._by_number.values()):
                    pipe.session.refuse_unaccepted(NATS_DOWN)
            for address, link in tuple(self._links.items()):
                if link.is_used:
                    link.beat(self._clock.now_s, self._disconnected_s, self._limits.dead_after_s)
                elif self._clock.now_s - link.used_s > self._limits.idle_close_s:
                    del self._links[address]
                if link.followers and link.pipe is None and self._client.is_connected:
                    self._pipe(link).session.send(FrameKind.PING)
            await tick(self._clock)
        for _, pipe in tuple(self._by_number.values()):
            pipe.session.lose("the connection to NATS was closed")

    def _note_disconnection(self) -> None:
        """Record the time of a lost connection, current or since the last check."""
        reconnects = self._client.stats["reconnects"]
        if not self._client.is_connected or reconnects != self._reconnects:
            self._disconnected_s, self._reconnects = self._clock.now_s, reconnects
