"""The router's end of requests over NATS."""

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, Leg
from kvrouter.transports.background import go_on
from kvrouter.transports.message_auth import Newest
from kvrouter.transports.nats_client import subject_name
from kvrouter.transports.requests.legs import AwakeClock
from kvrouter.transports.requests.liveness import LivenessListeners
from kvrouter.transports.requests.nats.frames import (
    Accepted,
    Beat,
    Box,
    Cancel,
    Chunk,
    Credit,
    Lost,
    Part,
    Post,
    Pulse,
    Refused,
    Tokens,
    WorkerFrame,
    answers_subject,
    from_worker,
    requests_subject,
    seal_of,
)
from kvrouter.transports.requests.port import (
    AliveSink,
    ReaderTooSlow,
    StreamBroken,
    WorkerFull,
    WorkerUnreachable,
)
from kvrouter.transports.requests.stream import REQUEST_MAX_BYTES, LegStream, encode_request, error_of

WINDOW_TOKENS = 2048
"""What a worker may send of one leg before the reader takes any of it."""

OVERRUN_TOKENS_MAX = 65_536
"""How far one chunk may go beyond the window."""

REASON_MAX = 1000
"""Characters of a reason that is sent to a worker."""

NOBODY_PULSES = 3
"""Pulses in a row that nobody hears, and the worker is lost."""


class NatsLeg:
    """One leg: opening until the worker accepts it, then a stream that is filled frame by frame."""

    def __init__(self, link: "NatsLink", number: int, request: EngineRequest) -> None:
        self.number = number
        self.granted_tokens = WINDOW_TOKENS
        self.received = 0
        self.stream = LegStream(on_read=self._on_read, on_cancel=self._on_cancel)
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = link
        self.is_prefill = request.leg is Leg.PREFILL
        self._read_tokens = 0

    def refuse(self, error: KvrouterError) -> None:
        """The leg was not taken."""
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def take(self, number: int, chunk: EngineChunk | None, token_ids: tuple[int, ...]) -> None:
        """A chunk came, or bare tokens."""
        if not self._is_next(number):
            return
        if chunk is None:
            self.stream.push_tokens(token_ids)
        else:
            self.stream.push(chunk)
        if self.stream.waiting_tokens > WINDOW_TOKENS + OVERRUN_TOKENS_MAX:
            self.give_up(StreamBroken(f"{self._link.address} sent more than it may"))
        elif self.stream.is_over:
            self._link.drop(self)

    def lose(self, number: int, error: KvrouterError) -> None:
        """The worker says that the leg is lost."""
        if self._is_next(number):
            self.stream.fail(error)
            self._link.drop(self)

    def compare(self, sent: int | None) -> None:
        """The worker sent ``sent`` frames so far; None when it runs no such leg."""
        if self.accepted.done() and sent != self.received:
            what = "the end of the answer" if sent is None else f"frames {self.received + 1} to {sent}"
            self.give_up(StreamBroken(f"{self._link.address}: {what} never came"))

    def give_up(self, error: KvrouterError) -> None:
        """End the leg here, and notify the worker."""
        self.refuse(WorkerUnreachable(error.message))
        self.stream.fail(error)
        self.withdraw(error.message)

    def withdraw(self, reason: str) -> None:
        """Notify the worker that the leg is not wanted."""
        self._link.drop(self)
        self._link.box.put(Cancel(self.number, reason[:REASON_MAX]))

    def _is_next(self, number: int) -> bool:
        if self.accepted.done() and number == self.received + 1:
            self.received = number
            return True
        self.give_up(StreamBroken(f"{self._link.address}: frame {self.received + 1} never came"))
        return False

    def _on_read(self, read_tokens: int) -> None:
        self._read_tokens += read_tokens
        if self.granted_tokens - self._read_tokens <= WINDOW_TOKENS // 2 and not self.stream.is_over:
            self.granted_tokens = self._read_tokens + WINDOW_TOKENS
            self._link.box.put(Credit(self.number, self.granted_tokens))

    def _on_cancel(self, reason: str) -> None:
        if self.is_prefill or self.number in self._link.legs:
            self.withdraw(reason)


class NatsLink:
    """What the plane has with one worker."""

    def __init__(self, address: str, worker: tuple[WorkerId, Epoch], box: Box, now_s: float) -> None:
        self.address = address
        self.worker = worker
        self.box = box
        self.legs: dict[int, NatsLeg] = {}
        self.prefilled: WeakSet[LegStream] = WeakSet()
        self.followers = LivenessListeners()
        self.heard_s = now_s
        self.used_s = now_s
        self.unanswered_pulses = 0

    @property
    def is_used(self) -> bool:
        """Whether anybody wants to know how the worker is."""
        return bool(self.legs or self.prefilled or self.followers)

    def use(self, now_s: float) -> None:
        """Somebody wants to know from now on: silence counts from here."""
        if not self.is_used:
            self.heard_s = now_s
        self.used_s = now_s
        self.unanswered_pulses = 0

    def drop(self, leg: NatsLeg) -> None:
        """A leg has ended; idempotent. While somebody keeps the stream of a prefill leg, the worker hears
        that this router lives, and keeps what it prefilled.
        """
        if self.legs.pop(leg.number, None) is not None and leg.is_prefill:
            self.prefilled.add(leg.stream)

    def hear_nobody(self, *, was_deaf: bool) -> None:
        """Nobody listens at the worker's subject. A worker may be about to connect again, so open legs break
        only when nobody was there for some pulses in a row, and followers hear nothing while the plane itself
        has only just come back: else those routers alone would lose workers that were faster than they.
        """
        why = f"nobody serves {self.address}"
        if not was_deaf:
            self.followers.tell(is_alive=False)
        for leg in tuple(self.legs.values()):
            if not leg.accepted.done():
                leg.refuse(WorkerUnreachable(why))
            elif self.unanswered_pulses >= NOBODY_PULSES:
                leg.give_up(StreamBroken(why))

    def hear(self, frames: list[WorkerFrame], now_s: float) -> None:
        """The worker spoke."""
        self.heard_s = now_s
        self.unanswered_pulses = 0
        self.followers.tell(is_alive=True)
        for frame in frames:
            if isinstance(frame, Beat):
                for leg in tuple(self.legs.values()):
                    leg.compare(frame.sent.get(leg.number))
            elif frame.leg in self.legs:
                self._hear_of(self.legs[frame.leg], frame)

    def _hear_of(self, leg: NatsLeg, frame: Accepted | Refused | Tokens | Chunk | Lost) -> None:
        if isinstance(frame, Tokens):
            leg.take(frame.number, None, frame.token_ids)
        elif isinstance(frame, Chunk):
            leg.take(frame.number, frame.chunk, ())
        elif isinstance(frame, Lost):
            leg.lose(frame.number, error_of(frame.refusal))
        elif isinstance(frame, Refused):
            leg.refuse(error_of(frame.refusal))
        elif not leg.accepted.done():
            leg.accepted.set_result(None)

    def pulse(self) -> None:
        """Ask the worker to speak."""
        self.unanswered_pulses += 1
        self.box.put(Pulse({leg.number: leg.granted_tokens for leg in self.legs.values()}))

    def check(self, now_s: float, deaf_s: float, dead_after_s: float, slow_stream_limit_s: float) -> None:
        """Break legs whose worker is silent or whose reader is slow. Silence while the plane was deaf itself
        says nothing about the worker to those who follow it.
        """
        if now_s - max(self.heard_s, deaf_s) > dead_after_s:
            self.followers.tell(is_alive=False)
        is_silent = now_s - self.heard_s > dead_after_s
        for leg in tuple(self.legs.values()):
            if is_silent:
                leg.give_up(StreamBroken(f"{self.address} was not heard for {dead_after_s} s"))
            elif leg.stream.unread_for_s(now_s) > slow_stream_limit_s:
                leg.give_up(ReaderTooSlow(f"the reader took nothing for {slow_stream_limit_s} s"))


PART_HEAD_BYTES = 64
LEG_IN_PULSE_BYTES = 16
"""What a leg adds to a pulse, which is one message: it limits the legs that a worker runs for a router."""

NATS_DOWN = "the connection to NATS is down"

LINK_IDLE_S = 60.0
"""How long the name of a worker that nobody uses is kept."""


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
        self._slow_stream_limit_s = slow_stream_limit_s
        self._on_refused = on_refused
        self._router = secrets.token_hex(8)
        self._post = Post(client, self._seal)
        self._leg_numbers = itertools.count()
        self._link_numbers = itertools.count()
        self._links: dict[str, tuple[int, NatsLink]] = {}
        self._by_number: dict[int, NatsLink] = {}
        self._listening: asyncio.Task[Subscription] | None = None
        self._clock = AwakeClock(self._heartbeat_s)
        self._beating: asyncio.Task[None] | None = None
        self._deaf_s = -math.inf
        self._reconnects = client.stats["reconnects"]
        self._closed = False

    async def open(self, address: str, request: EngineRequest) -> LegStream:
        """Send ``request``; return once the worker accepted it. WorkerUnreachable when it did not."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        if not self._client.is_connected:
            raise WorkerUnreachable(NATS_DOWN)
        body = encode_request(request)
        if len(body) > REQUEST_MAX_BYTES:
            raise InvalidRequest(f"{len(body)} bytes are above {REQUEST_MAX_BYTES}", param="token_ids")
        link = self._link(address)
        if len(link.legs) >= self._post.frames_max_bytes // LEG_IN_PULSE_BYTES:
            raise WorkerFull(f"{len(link.legs)} legs of this router run at {address}")
        leg = NatsLeg(link, next(self._leg_numbers), request)
        link.legs[leg.number] = leg
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await self._listen()
                self._send(link, leg, body)
                await leg.accepted
        except TimeoutError:
            why = f"{address} did not answer in {self._open_timeout_s} s"
            leg.withdraw(why)
            raise WorkerUnreachable(why) from None
        except KvrouterError:
            link.drop(leg)
            raise
        except BaseException:
            leg.withdraw("the router gave the leg up")
            raise
        return leg.stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Keep watch over the worker at ``address``; return the function that ends it, idempotent."""
        return self._link(address).followers.add(on_alive)

    async def close(self) -> None:
        """End every leg; open streams break."""
        self._closed = True
        for link in self._by_number.values():
            for leg in tuple(link.legs.values()):
                leg.refuse(WorkerUnreachable("the plane was closed"))
                leg.stream.break_off("the plane was closed")
                leg.withdraw("the router closed its connection")
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self._post.close()
        if self._listening is not None:
            with suppress(NatsError, OSError):  # where the connection is gone, the subscription is too
                await (await self._listening).unsubscribe()

    def _send(self, link: NatsLink, leg: NatsLeg, body: bytes) -> None:
        """Put the request into the post, in parts when it is larger than a message."""

        def on_unsent(why: str) -> None:
            leg.refuse(WorkerUnreachable(why))

        part_bytes = self._post.frames_max_bytes - PART_HEAD_BYTES
        for at in range(0, len(body), part_bytes):
            part = Part(leg.number, leg.granted_tokens, len(body), at, body[at : at + part_bytes])
            link.box.put(part, on_unsent)

    def _link(self, address: str) -> NatsLink:
        """Return the link to a worker, in use from now on; WorkerUnreachable for a strange address."""
        now_s = self._clock.now_s
        if address not in self._links:
            self._links[address] = self._new_link(address, now_s)
        _, link = self._links[address]
        link.use(now_s)
        if self._beating is None:
            self._beating = go_on(self._beat(), name="requests: look after workers")
        return link

    def _new_link(self, address: str, now_s: float) -> tuple[int, NatsLink]:
        namespace, _, worker = address.removeprefix("nats://").partition("/")
        worker_id, _, incarnation = worker.partition("/")
        if namespace != self._namespace or not worker_id.isdecimal() or not incarnation.isdecimal():
            raise WorkerUnreachable(f"{address} is no worker's address on nats://{self._namespace}")
        who = (WorkerId(int(worker_id)), Epoch(int(incarnation)))
        number = next(self._link_numbers)
        answers = answers_subject(self._namespace, self._router, number)
        box = Box(self._post, requests_subject(self._namespace, *who), answers, (self._router, number))
        link = self._by_number[number] = NatsLink(address, who, box, now_s)
        return number, link

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
        link = self._by_number.get(int(number)) if number.isdecimal() else None
        if link is None:
            return
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
            link.hear(said.frames, self._clock.now_s)
        else:
            self._on_refused("a worker's message came again")

    async def _beat(self) -> None:
        """Send pulses, and see who answers."""
        while not self._client.is_closed:
            self._note_deafness()
            if self._client.is_connected:
                with suppress(WorkerUnreachable):
                    await self._listen()
            else:
                self._refuse_unaccepted()
            for address, (number, link) in tuple(self._links.items()):
                if link.is_used:
                    link.check(self._clock.now_s, self._deaf_s, self._dead_after_s, self._slow_stream_limit_s)
                    if self._client.is_connected:
                        link.pulse()
                elif self._clock.now_s - link.used_s > LINK_IDLE_S:
                    del self._links[address], self._by_number[number]
            await self._clock.tick()
        for link in self._by_number.values():
            for leg in tuple(link.legs.values()):
                leg.give_up(StreamBroken("the connection to NATS was closed"))

    def _note_deafness(self) -> None:
        """See whether the connection is away, or was since the last time."""
        reconnects = self._client.stats["reconnects"]
        if not self._client.is_connected or reconnects != self._reconnects:
            self._deaf_s, self._reconnects = self._clock.now_s, reconnects

    def _refuse_unaccepted(self) -> None:
        """Without a connection no leg is accepted: a request that waits is better sent elsewhere now."""
        for link in self._by_number.values():
            for leg in link.legs.values():
                leg.refuse(WorkerUnreachable(NATS_DOWN))
