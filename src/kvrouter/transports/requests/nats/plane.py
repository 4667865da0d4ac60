"""The router's end of requests over NATS."""

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.background import go_on
from kvrouter.transports.message_auth import Newest
from kvrouter.transports.nats_client import subject_name
from kvrouter.transports.requests.legs import CONNECTION_CLOSED, AwakeClock
from kvrouter.transports.requests.liveness import LivenessListeners
from kvrouter.transports.requests.messages import FrameKind
from kvrouter.transports.requests.nats.pipe import (
    NatsPipe,
    Post,
    answers_subject,
    from_worker,
    requests_subject,
    seal_of,
)
from kvrouter.transports.requests.port import AliveSink, WorkerUnreachable
from kvrouter.transports.requests.session import STREAMS_MAX, UNREAD_MAX_BYTES, RouterLimits, RouterSession
from kvrouter.transports.requests.stream import SessionStream

WINDOW_TOKENS = 2048
"""What a worker may send of one leg before the reader takes any of it."""

NOBODY_BEATS = 3
"""Signs of life in a row that nobody hears, and the worker is lost."""

NATS_DOWN = "the connection to NATS is down"

LINK_IDLE_S = 60.0
"""How long a session that nobody uses, and the name of its worker, are kept."""


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
                session.lose("nobody serves it")

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

    A worker has ``open_timeout_s`` to accept a leg; while the client is not connected, none is opened: what
    the client would keep until it is connected again would come too late. A worker that is not heard for
    ``dead_after_s`` is lost, also when it is the connection to NATS that is; a shorter outage in which
    nothing was lost harms no stream. A reader that takes nothing for ``slow_stream_limit_s`` while chunks
    wait loses its leg.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        open_timeout_s: float = 5.0,
        heartbeat_s: float | None = None,
        dead_after_s: float = 5.0,
        slow_stream_limit_s: float = 60.0,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._client = client
        self._namespace = subject_name(namespace)
        self._seal = seal_of(token, self._namespace)
        self._newest = Newest()
        self._open_timeout_s = open_timeout_s
        self._heartbeat_s = dead_after_s / 6 if heartbeat_s is None else heartbeat_s
        self._dead_after_s = dead_after_s
        self._limits = RouterLimits(
            heartbeat_s=self._heartbeat_s,
            dead_after_s=dead_after_s,
            slow_stream_limit_s=slow_stream_limit_s,
            idle_close_s=LINK_IDLE_S,
            stream_credit_tokens=WINDOW_TOKENS,
            streams_max=STREAMS_MAX,
            write_max_bytes=UNREAD_MAX_BYTES,
        )
        self._on_refused = on_refused
        self._router = secrets.token_hex(8)
        self._post = Post(client, self._seal)
        self._link_numbers = itertools.count()
        self._links: dict[str, NatsLink] = {}
        self._by_number: dict[int, tuple[NatsLink, RouterPipe]] = {}
        self._listening: asyncio.Task[Subscription] | None = None
        self._clock = AwakeClock(self._heartbeat_s)
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
            async with asyncio.timeout(self._open_timeout_s):
                await self._listen()
                stream = self._pipe(link).session.open(request, 0)
                await stream.accepted
        except TimeoutError:
            why = f"{address} did not answer in {self._open_timeout_s} s"
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
            link.hear_nobody(was_deaf=self._clock.now_s - self._deaf_s <= self._dead_after_s)
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
                    link.beat(self._clock.now_s, self._deaf_s, self._dead_after_s)
                elif self._clock.now_s - link.used_s > LINK_IDLE_S:
                    del self._links[address]
                if link.followers and link.pipe is None and self._client.is_connected:
                    self._pipe(link).session.send(FrameKind.PING)
            await self._clock.tick()
        for _, pipe in tuple(self._by_number.values()):
            pipe.session.lose("the connection to NATS was closed")

    def _note_deafness(self) -> None:
        """See whether the connection is away, or was since the last time."""
        reconnects = self._client.stats["reconnects"]
        if not self._client.is_connected or reconnects != self._reconnects:
            self._deaf_s, self._reconnects = self._clock.now_s, reconnects
