"""A session's pipe over NATS: its bytes in sealed and numbered messages, their subjects, their sender."""

import asyncio
import itertools
import math
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.json import unpacked
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.background import go_on, tick
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth, Newest
from kvrouter.transports.nats_client import subject_name
from kvrouter.transports.requests.legs import CONNECTION_CLOSED
from kvrouter.transports.requests.messages import FrameKind, frame
from kvrouter.transports.requests.port import AliveSink, LivenessListeners, WorkerUnreachable
from kvrouter.transports.requests.session import (
    ROUTER_LIMITS,
    RouterLimits,
    RouterSession,
    Session,
)
from kvrouter.transports.requests.stream import SessionStream

VERSION = 2
"""Of the plane over NATS. Ends of different versions use different subjects and keys: to each other, nobody
listens there."""

SIGNS = frozenset({frame(FrameKind.PING), frame(FrameKind.PONG)})
"""Mere signs of life, which are not counted: one that nobody heard is no loss."""

MESSAGE_MAX_BYTES = 1 << 20
"""The longest message that is sent, where the server would take a longer one."""

ENVELOPE_BYTES = MESSAGE_AUTH_BYTES + 256
"""What a message has in addition to the session's bytes: the seal, and who speaks."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class FromRouter(msgspec.Struct, frozen=True, array_like=True):
    """One message of a router. ``link`` names its session: the last word of the answers' subject."""

    router: str
    link: int
    n_before: int
    is_sign: bool
    data: bytes


class FromWorker(msgspec.Struct, frozen=True, array_like=True):
    """One message of a worker, to one session of a router."""

    worker_id: WorkerId
    incarnation: Epoch
    n_before: int
    is_sign: bool
    data: bytes


def message_auth_of(token: str, namespace: str) -> MessageAuth:
    """Return the seal of the plane's messages."""
    return MessageAuth(token, f"requests {VERSION} {namespace}")


def from_router(seal: MessageAuth, subject: str, message: bytes) -> tuple[int, FromRouter]:
    """Return a message's number and what a router says; raise ProtocolError. A stranger's is not parsed."""
    number, body = seal.numbered(subject, message)
    said = unpacked(_from_router, body, "message")
    if not _NAME.fullmatch(said.router):
        raise ProtocolError(f"{said.router!r} is no router", param="router")
    return number, said


def from_worker(seal: MessageAuth, subject: str, message: bytes) -> tuple[int, FromWorker]:
    """Return a message's number and what a worker says; raise ProtocolError. A stranger's is not parsed."""
    number, body = seal.numbered(subject, message)
    return number, unpacked(_from_worker, body, "message")


def requests_subject(namespace: str, worker_id: WorkerId, incarnation: Epoch) -> str:
    """Where one incarnation of a worker listens."""
    return f"kvrouter.{namespace}.requests.{VERSION}.{worker_id}.{incarnation}"


def answers_subject(namespace: str, router: str, link: int | str) -> str:
    """Where a router listens."""
    return f"kvrouter.{namespace}.answers.{router}.{link}"


_encoder = msgspec.msgpack.Encoder()
_from_router = msgspec.msgpack.Decoder(FromRouter)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


class NatsPipe:
    """What carries one session: numbered messages to one subject, and those that come back.

    NATS delivers at most once. Every message says how many were sent before it, so that one that was lost is
    noticed with the next, a sign of life at the latest; it ends the session. ``replies_to`` hears when nobody
    listens at ``subject``. The ``session`` is set by who makes the pipe, and is given :meth:`wake`.
    """

    session: Session

    def __init__(
        self, post: "PipePublisher", subject: str, replies_to: str, speaker: tuple[str | int, int]
    ) -> None:
        self.subject = subject
        self.replies_to = replies_to
        self._post = post
        self._speaker = speaker
        self._n_sent = 0
        self._n_received = 0

    def wake(self) -> None:
        """The session has something to send."""
        self._post.wake(self)

    def receive(self, said: FromRouter | FromWorker) -> None:
        """Give the session what the other end says; end it where a message is missing."""
        if said.n_before != self._n_received:
            self.session.close("a message was lost on the way")
            return
        self._n_received += not said.is_sign
        self.session.receive(said.data)

    def message(self, data: bytes, *, is_sign: bool) -> bytes:
        """Return the next message, to be sealed."""
        body = _encoder.encode((*self._speaker, self._n_sent, is_sign, data))
        self._n_sent += not is_sign
        return body


class PipePublisher:
    """Publishes what the sessions of its pipes have to say, in messages that NATS takes.

    Its messages are numbered from 1, whatever pipe they are from.
    """

    def __init__(self, client: Client, seal: MessageAuth) -> None:
        self._client = client
        self._seal = seal
        self._numbers = itertools.count(1)
        self._full: dict[NatsPipe, None] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self, pipe: NatsPipe) -> None:
        """Something waits in ``pipe``."""
        self._full[pipe] = None
        self._more.set()
        if self._task is None:
            self._task = go_on(self._run(), name="requests: send messages")

    async def close(self) -> None:
        """Send what waits, and no more."""
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
            return  # in an outage signs would fill the client's buffer, which then refuses what must arrive
        body = pipe.message(data, is_sign=is_sign)
        message = self._seal.seal(pipe.subject, body, number=next(self._numbers))
        try:
            await self._client.publish(pipe.subject, message, reply=pipe.replies_to)
        except Exception as error:  # noqa: BLE001 - one message that the client fails on keeps no other back
            if not is_sign:
                pipe.session.lose(f"NATS: {type(error).__name__}: {error}")


WINDOW_TOKENS = 2048
"""What a worker may send of one leg before the reader takes any of it."""

NOBODY_BEATS = 3
"""Signs of life in a row that nobody hears, and the worker is lost."""

NATS_DOWN = "the connection to NATS is down"


class RouterPipe(NatsPipe):
    """The pipe of one session with one worker."""

    session: RouterSession[SessionStream]


class NatsLink:
    """What the plane has with one worker: those that follow it, and at most one session."""

    def __init__(self, address: str, worker: tuple[WorkerId, Epoch], now_s: float) -> None:
        self.address = address
        self.worker = worker
        self.pipe: RouterPipe | None = None
        self.followers = LivenessListeners()
        self.heard_s = now_s
        self.used_s = now_s
        self.unanswered_beats = 0

    @property
    def is_used(self) -> bool:
        """Whether anybody wants to know how the worker is."""
        return self.pipe is not None or bool(self.followers)

    def use(self, now_s: float) -> None:
        """Somebody wants to know from now on: silence counts from here."""
        if not self.is_used:
            self.heard_s = now_s
        self.used_s = now_s
        self.unanswered_beats = 0

    def hear(self, now_s: float) -> None:
        """The worker spoke."""
        self.heard_s = now_s
        self.unanswered_beats = 0
        self.followers.tell(is_alive=True)

    def hear_nobody(self, *, was_deaf: bool) -> None:
        """Nobody listens at the worker's subject. A worker may be about to connect again, so open legs break
        only when nobody was there for some beats in a row, and followers hear nothing while the plane itself
        has only just come back: else those routers alone would lose workers that were faster than they.
        """
        if not was_deaf:
            self.followers.tell(is_alive=False)
        if self.pipe is not None:
            session = self.pipe.session
            session.refuse_unaccepted(f"nobody serves {self.address}")
            if not session.n_streams or self.unanswered_beats >= NOBODY_BEATS:
                session.give_up("nobody serves it")

    def beat(self, now_s: float, deaf_s: float, dead_after_s: float) -> None:
        """Silence while the plane was deaf itself says nothing about the worker to those who follow it."""
        if now_s - max(self.heard_s, deaf_s) > dead_after_s:
            self.followers.tell(is_alive=False)
        self.unanswered_beats += 1
        if self.pipe is not None:
            self.pipe.session.tick(now_s)


class NatsRequestPlane:
    """Opens streams to workers at ``nats://<namespace>/<worker id>/<incarnation>``, over a connection that
    its caller made and closes.

    While the client is not connected, no leg is opened: what the client would keep until it is connected
    again would come too late. A worker that is not heard is lost also when it is the connection to NATS that
    is; a shorter outage in which nothing was lost harms no stream.
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
        self._seal = message_auth_of(token, self._namespace)
        self._newest = Newest()
        self._limits = replace(limits, stream_credit_tokens=WINDOW_TOKENS)
        self._on_refused = on_refused
        self._router = secrets.token_hex(8)
        self._post = PipePublisher(client, self._seal)
        self._link_numbers = itertools.count()
        self._links: dict[str, NatsLink] = {}
        self._by_number: dict[int, tuple[NatsLink, RouterPipe]] = {}
        self._listening: asyncio.Task[Subscription] | None = None
        self._clock = AwakeClock(self._limits.heartbeat_s)
        self._beating: asyncio.Task[None] | None = None
        self._deaf_s = -math.inf
        self._reconnects = client.stats["reconnects"]
        self._closed = False

    async def open(self, address: str, request: EngineRequest) -> SessionStream:
        """Send ``request``; return once the worker accepted it. WorkerUnreachable when it did not."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        if not self._client.is_connected:
            raise WorkerUnreachable(NATS_DOWN)
        link = self._link(address)
        stream: SessionStream | None = None
        try:
            async with asyncio.timeout(self._limits.open_timeout_s):
                await self._listen()
                if self._closed:
                    raise WorkerUnreachable("the plane was closed")
                stream = self._pipe(link).session.open(request, 0)
                await stream.accepted
        except TimeoutError:
            why = f"{address} did not answer in {self._limits.open_timeout_s} s"
            if stream is not None:
                stream.cancel(why)
            raise WorkerUnreachable(why) from None
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel("the router gave the leg up")
            raise
        return stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Keep watch over the worker at ``address``; return the function that ends it, idempotent."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        return self._link(address).followers.add(on_alive)

    async def close(self) -> None:
        """End every leg; open streams break."""
        self._closed = True
        for _, pipe in tuple(self._by_number.values()):
            pipe.session.close(CONNECTION_CLOSED)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self._post.close()
        if self._listening is not None:
            with suppress(NatsError, OSError):  # where the connection is gone, the subscription is too
                await (await self._listening).unsubscribe()

    def _link(self, address: str) -> NatsLink:
        """Return the link to a worker, in use from now on; WorkerUnreachable for a strange address."""
        now_s = self._clock.now_s
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = NatsLink(address, self._worker(address), now_s)
        link.use(now_s)
        if self._beating is None:
            self._beating = go_on(self._beat(), name="requests: look after workers")
        return link

    def _worker(self, address: str) -> tuple[WorkerId, Epoch]:
        namespace, _, worker = address.removeprefix("nats://").partition("/")
        worker_id, _, incarnation = worker.partition("/")
        if namespace != self._namespace or not worker_id.isdecimal() or not incarnation.isdecimal():
            raise WorkerUnreachable(f"{address} is no worker's address on nats://{self._namespace}")
        return WorkerId(int(worker_id)), Epoch(int(incarnation))

    def _pipe(self, link: NatsLink) -> RouterPipe:
        """Return the pipe of the session with a worker; a new one where there is none."""
        if link.pipe is not None:
            return link.pipe
        number = next(self._link_numbers)
        answers = answers_subject(self._namespace, self._router, number)
        requests = requests_subject(self._namespace, *link.worker)
        pipe = link.pipe = RouterPipe(self._post, requests, answers, (self._router, number))

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

    async def _listen(self) -> None:
        """Subscribe to the answers, once. WorkerUnreachable when the client does not do it."""
        if self._listening is None or (self._listening.done() and self._listening.exception() is not None):
            subject = answers_subject(self._namespace, self._router, "*")
            self._listening = asyncio.create_task(self._client.subscribe(subject, cb=self._hear))
        try:
            await asyncio.shield(self._listening)
        except (NatsError, OSError) as error:
            raise WorkerUnreachable(f"NATS: {error}") from error

    async def _hear(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        known = self._by_number.get(int(number)) if number.isdecimal() else None
        if known is None:
            return
        link, pipe = known
        if message.headers is not None and message.headers.get("Status") == "503":
            self._note_deafness()
            link.hear_nobody(was_deaf=self._clock.now_s - self._deaf_s <= self._limits.dead_after_s)
            return
        try:
            sent, said = from_worker(self._seal, message.subject, message.data)
        except ProtocolError as error:
            self._on_refused(error.message)
            return
        if (said.worker_id, said.incarnation) != link.worker:
            return
        if self._newest.takes(message.subject, sent):
            link.hear(self._clock.now_s)
            pipe.receive(said)
        else:
            self._on_refused("a worker's message came again")

    async def _beat(self) -> None:
        """Give signs of life, and see who lives."""
        while not self._client.is_closed:
            self._note_deafness()
            if self._client.is_connected:
                with suppress(WorkerUnreachable):
                    await self._listen()
            else:  # a request that waits is better sent elsewhere now
                for _, pipe in tuple(self._by_number.values()):
                    pipe.session.refuse_unaccepted(NATS_DOWN)
            for address, link in tuple(self._links.items()):
                if link.is_used:
                    link.beat(self._clock.now_s, self._deaf_s, self._limits.dead_after_s)
                elif self._clock.now_s - link.used_s > self._limits.idle_close_s:
                    del self._links[address]
                if link.followers and link.pipe is None and self._client.is_connected:
                    self._pipe(link).session.send(FrameKind.PING)
            await tick(self._clock)
        for _, pipe in tuple(self._by_number.values()):
            pipe.session.lose("the connection to NATS was closed")

    def _note_deafness(self) -> None:
        """See whether the connection is away, or was since the last time."""
        reconnects = self._client.stats["reconnects"]
        if not self._client.is_connected or reconnects != self._reconnects:
            self._deaf_s, self._reconnects = self._clock.now_s, reconnects
