"""The router's end of the request plane over NATS."""

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

from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.planes.background import go_on
from kvrouter.planes.names import subject_name
from kvrouter.planes.requests.awake import AwakeClock
from kvrouter.planes.requests.nats.frames import (
    Part,
    answers_subject,
    from_worker,
    requests_subject,
    seal_of,
)
from kvrouter.planes.requests.nats.link import Link, NatsLeg
from kvrouter.planes.requests.nats.post import Box, Post
from kvrouter.planes.requests.port import (
    AliveSink,
    StreamBroken,
    WorkerFull,
    WorkerUnreachable,
)
from kvrouter.planes.requests.stream import LegStream
from kvrouter.planes.requests.wire import REQUEST_MAX_BYTES, encode_request
from kvrouter.planes.seal import Newest

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
        self._links: dict[str, tuple[int, Link]] = {}
        self._by_number: dict[int, Link] = {}
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

    def _send(self, link: Link, leg: NatsLeg, body: bytes) -> None:
        """Put the request into the post, in parts when it is larger than a message."""

        def on_unsent(why: str) -> None:
            leg.refuse(WorkerUnreachable(why))

        part_bytes = self._post.frames_max_bytes - PART_HEAD_BYTES
        for at in range(0, len(body), part_bytes):
            part = Part(leg.number, leg.granted_tokens, len(body), at, body[at : at + part_bytes])
            link.box.put(part, on_unsent)

    def _link(self, address: str) -> Link:
        """Return the link to a worker, in use from now on; WorkerUnreachable for a strange address."""
        now_s = self._clock.now_s
        if address not in self._links:
            self._links[address] = self._new_link(address, now_s)
        _, link = self._links[address]
        link.use(now_s)
        if self._beating is None:
            self._beating = go_on(self._beat(), name="requests: look after workers")
        return link

    def _new_link(self, address: str, now_s: float) -> tuple[int, Link]:
        namespace, _, worker = address.removeprefix("nats://").partition("/")
        worker_id, _, incarnation = worker.partition("/")
        if namespace != self._namespace or not worker_id.isdecimal() or not incarnation.isdecimal():
            raise WorkerUnreachable(f"{address} is no worker's address on nats://{self._namespace}")
        who = (WorkerId(int(worker_id)), Epoch(int(incarnation)))
        number = next(self._link_numbers)
        answers = answers_subject(self._namespace, self._router, number)
        box = Box(self._post, requests_subject(self._namespace, *who), answers, (self._router, number))
        link = self._by_number[number] = Link(address, who, box, now_s)
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
