"""The worker's end of requests over NATS."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvrouter.core.errors import ConfigError, InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.transports.background import go_on
from kvrouter.transports.message_auth import Newest, Seal
from kvrouter.transports.nats_client import flush_subscriptions, subject_name
from kvrouter.transports.requests.legs import AwakeClock, LegName, LegServer
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
    RouterFrame,
    Tokens,
    answers_subject,
    from_router,
    requests_subject,
    seal_of,
)
from kvrouter.transports.requests.port import RequestServer, WorkerFull, WorkerUnreachable
from kvrouter.transports.requests.stream import (
    REQUEST_MAX_BYTES,
    decode_request,
    is_bare,
    refusal_of,
    weight_of,
)

PARTS_MAX_BYTES = 256 * 1024 * 1024
"""Requests of which parts are missing, over all routers; one more is refused as WorkerFull."""

GOODBYE_S = 1.0
"""How long the legs of a plane that closes have to say that they are lost."""

ROUTERS_MAX = 4096
"""Routers that one worker answers; those beyond are not answered."""


class _Answer:
    """One leg's answer: numbered frames, as many as the router gave credit for."""

    def __init__(self, leg: int, box: Box, window_tokens: int) -> None:
        self.number = 0
        self.task: asyncio.Task[None] | None = None
        self._leg = leg
        self._box = box
        self._accepted = False
        self._sent_tokens = 0
        self._granted_tokens = window_tokens
        self._granted = asyncio.Event()

    def grant(self, granted_tokens: int) -> None:
        """The router has room for this many tokens since the leg began."""
        if granted_tokens > self._granted_tokens:
            self._granted_tokens = granted_tokens
            self._granted.set()

    async def accept(self) -> None:
        """Say so."""
        self._accepted = True
        self._box.put(Accepted(self._leg))

    def take(self, chunk: EngineChunk) -> bool:
        """Send, if there is credit. ProtocolError when no message can hold the chunk."""
        if self._sent_tokens >= self._granted_tokens:
            return False
        self._put(chunk)
        return True

    async def send(self, chunk: EngineChunk) -> None:
        """Send once there is credit."""
        while not self.take(chunk):
            self._granted.clear()
            await self._granted.wait()

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send, whether or not there is credit."""
        over()
        self._put(chunk)

    def _put(self, chunk: EngineChunk) -> None:
        number = self.number + 1
        if is_bare(chunk):
            self._box.put(Tokens(self._leg, number, chunk.token_ids))
        else:
            self._box.put(Chunk(self._leg, number, chunk))
        self.number = number
        self._sent_tokens += weight_of(chunk)

    async def end(self, error: Exception) -> None:
        """Refuse, or say that the leg is lost."""
        if self._accepted:
            self.number += 1
            self._box.put(Lost(self._leg, self.number, refusal_of(error)))
        else:
            self._box.put(Refused(self._leg, refusal_of(error)))


class _Parts:
    """A request of which some is still to come."""

    def __init__(self, first: Part, at_s: float) -> None:
        self.total_bytes = first.total_bytes
        self.at_s = at_s
        self.body = bytearray()


class _WorkerEndpoint:
    """One worker's place on NATS: what routers say to it, and what it answers them."""

    def __init__(
        self,
        place: LegServer,
        post: Post,
        *,
        namespace: str,
        worker: tuple[WorkerId, Epoch],
        seal: Seal,
        clock: AwakeClock,
        on_refused: Callable[[str], None],
    ) -> None:
        self.place = place
        self._post = post
        self._namespace = namespace
        self._worker = worker
        self._seal = seal
        self._newest = Newest()
        self._on_refused = on_refused
        self._clock = clock
        self._boxes: dict[tuple[str, int], Box] = {}
        self._answers: dict[LegName, _Answer] = {}
        self._parts: dict[LegName, _Parts] = {}

    async def hear(self, message: Msg) -> None:
        """Do what a router says."""
        try:
            number, said = from_router(self._seal, message.subject, message.data)
            if not self._newest.takes((said.router, said.link), number):
                raise ProtocolError("a router's message came again", param="number")
            box = self._box(said.router, said.link)
            for frame in said.frames:
                self._do(said.router, box, frame)
        except ProtocolError as error:
            self._on_refused(error.message)

    def check(self, dead_after_s: float) -> None:
        """Cancel legs of routers that are lost, and forget requests whose other parts never came."""
        self.place.cancel_silent(dead_after_s)
        too_old_s = self._clock.now_s - dead_after_s
        for name in [name for name, parts in self._parts.items() if parts.at_s < too_old_s]:
            del self._parts[name]
        busy = {name.router for name in (*self._answers, *self._parts)}
        if len(self._boxes) > ROUTERS_MAX // 2:
            self._boxes = {key: box for key, box in self._boxes.items() if key[0] in busy}

    def _box(self, router: str, link: int) -> Box:
        box = self._boxes.get((router, link))
        if box is None:
            if len(self._boxes) >= ROUTERS_MAX:
                raise ProtocolError(f"{ROUTERS_MAX} routers are known already", param="router")
            subject = answers_subject(self._namespace, router, link)
            box = self._boxes[router, link] = Box(self._post, subject, "", self._worker)
        return box

    def _do(self, router: str, box: Box, frame: RouterFrame) -> None:
        if isinstance(frame, Pulse):
            self._pulse(router, box, frame)
            return
        name = LegName(router, frame.leg)
        if isinstance(frame, Credit):
            answer = self._answers.get(name)
            if answer is not None:
                answer.grant(frame.granted_tokens)
        elif isinstance(frame, Cancel):
            self._cancel(name, frame.reason)
        elif name not in self._answers:
            self._take(name, box, frame)

    def _cancel(self, name: LegName, reason: str) -> None:
        self._parts.pop(name, None)
        self.place.cancel(name, reason)
        answer = self._answers.get(name)
        if answer is not None and answer.task is not None:
            answer.task.cancel()  # also where the place has not seen the leg yet

    def _pulse(self, router: str, box: Box, pulse: Pulse) -> None:
        self.place.hear(router)
        self.place.keep_only(router, pulse.granted_tokens)
        sent: dict[int, int] = {}
        for name, answer in self._answers.items():
            if name.router == router and name.number in pulse.granted_tokens:
                answer.grant(pulse.granted_tokens[name.number])
                sent[name.number] = answer.number
        box.put(Beat(sent))

    def _take(self, name: LegName, box: Box, part: Part) -> None:
        """Add a part to its request; serve the request once it is whole."""
        try:
            body = self._whole(name, part)
            if body is None:
                return
            request = decode_request(body)
        except KvrouterError as error:
            self._parts.pop(name, None)
            box.put(Refused(name.number, refusal_of(error)))
            return
        answer = self._answers[name] = _Answer(name.number, box, part.window_tokens)
        answer.task = go_on(self.place.run(name, request, answer), name="requests: serve a leg")
        answer.task.add_done_callback(lambda _task: self._answers.pop(name))

    def _whole(self, name: LegName, part: Part) -> bytes | memoryview | None:
        if part.total_bytes > REQUEST_MAX_BYTES:
            raise InvalidRequest(f"{part.total_bytes} bytes are above {REQUEST_MAX_BYTES}", param="token_ids")
        if len(part.body) == part.total_bytes:
            return part.body
        parts = self._parts.get(name)
        if parts is None:
            waiting_bytes = sum(other.total_bytes for other in self._parts.values())
            if waiting_bytes + part.total_bytes > PARTS_MAX_BYTES:
                raise WorkerFull(f"requests of {PARTS_MAX_BYTES} bytes are being received")
            parts = self._parts[name] = _Parts(part, self._clock.now_s)
        if part.from_byte != len(parts.body) or len(part.body) > parts.total_bytes - part.from_byte:
            raise WorkerUnreachable("a part of the request was lost")
        parts.body += part.body
        if len(parts.body) < parts.total_bytes:
            return None
        del self._parts[name]
        return memoryview(parts.body)


class _NatsPlace(LegServer):
    """A place that routers reach once NATS knows of its subscription."""

    client: Client
    subscribing: "asyncio.Task[Subscription]"

    async def served(self) -> None:
        """Return once NATS knows that the worker listens; raise ConfigError when it does not answer."""
        try:
            await asyncio.shield(self.subscribing)
            await flush_subscriptions(self.client)
        except (NatsError, OSError) as error:
            raise ConfigError(f"NATS: {self.address} cannot be served: {error}", param="client") from error


class NatsRequestAcceptor:
    """Serves any number of workers of this process over a NATS connection that its caller made and closes.

    A router that is not heard for ``dead_after_s`` is lost, and its legs are cancelled. ``on_refused`` hears
    why a message was not taken.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        dead_after_s: float = 5.0,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._client = client
        self._namespace = subject_name(namespace)
        self._seal = seal_of(token, self._namespace)
        self._dead_after_s = dead_after_s
        self._on_refused = on_refused
        self._post = Post(client, self._seal)
        self._endpoints: dict[str, _WorkerEndpoint] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._clock = AwakeClock(dead_after_s / 6)
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch over the routers."""
        self._checking = go_on(self._check(), name="requests: look after routers")

    async def close(self) -> None:
        """Every worker leaves; what was said is sent."""
        places = [endpoint.place for endpoint in self._endpoints.values()]
        for place in places:
            place.leave("the worker's end of the plane was closed")
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(*(place.wait_idle(GOODBYE_S) for place in places))
        await asyncio.gather(*self._leaving)
        await self._post.close()

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return what the card of a worker served here says."""
        return f"nats://{self._namespace}/{worker_id}/{incarnation}"

    def serve(self, address: str, server: RequestServer) -> _NatsPlace:
        """Make ``server`` reachable under an address that :meth:`address_of` gave, until it leaves."""
        if address in self._endpoints:
            raise ConfigError(f"{address} is served already", param="address")
        if self._client.is_closed:
            raise ConfigError("the connection to NATS is closed", param="client")
        words = address.removeprefix("nats://").rsplit("/", 2)
        worker = (WorkerId(int(words[1])), Epoch(int(words[2])))
        place = _NatsPlace(address, server, self._clock, lambda _why: self._leave(address, place))
        self._endpoints[address] = _WorkerEndpoint(
            place,
            self._post,
            namespace=self._namespace,
            worker=worker,
            seal=self._seal,
            clock=self._clock,
            on_refused=self._on_refused,
        )
        subject = requests_subject(self._namespace, *worker)
        hear = self._endpoints[address].hear
        place.client = self._client
        place.subscribing = asyncio.create_task(self._client.subscribe(subject, cb=hear))
        return place

    def _leave(self, address: str, place: _NatsPlace) -> None:
        del self._endpoints[address]
        task = asyncio.create_task(self._unsubscribe(place.subscribing))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _unsubscribe(self, subscribing: asyncio.Task[Subscription]) -> None:
        with suppress(NatsError, OSError):  # where the connection is gone, the subscription is too
            await (await subscribing).unsubscribe()

    async def _check(self) -> None:
        while True:
            await self._clock.tick()
            for endpoint in tuple(self._endpoints.values()):
                endpoint.check(self._dead_after_s)
