"""The worker's end of one connection: it takes legs for one worker and sends what they bring."""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.planes.background import go_on
from kvrouter.planes.requests.legs import CONNECTION_CLOSED, LegName, Place
from kvrouter.planes.requests.port import WorkerFull
from kvrouter.planes.requests.tcp.answer import TcpAnswer
from kvrouter.planes.requests.tcp.connection import LEFT, Connection
from kvrouter.planes.requests.tcp.frames import (
    CHUNKS_FLUSH_TOKENS,
    TO_WORKER,
    Item,
    Kind,
    cancel_decoder,
    credits_decoder,
    decode,
    encode_items,
    encode_refused,
    open_decoder,
    whole_chunk,
)
from kvrouter.planes.requests.tcp.hello import HELLO_BYTES, Hello, Secret, greeting, new_nonce, read_hello
from kvrouter.planes.requests.wire import decode_request, is_bare

ITEM_TOKENS = 64
"""What an item counts beside its tokens towards a full frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What a worker's end keeps to; the constructor of the acceptor says what each means."""

    heartbeat_s: float
    dead_after_s: float
    hello_within_s: float
    streams_max: int
    write_max_bytes: int


class Served(NamedTuple):
    """A worker behind the listener, and the connections that routers have to it."""

    place: Place
    ends: "set[WorkerEnd]"


class Door(Protocol):
    """Who counts the connections of a listener."""

    def arrived(self, end: "WorkerEnd") -> None:
        """A connection was made; nobody knows whose."""

    def admit(self, end: "WorkerEnd") -> str | None:
        """It said who it is, and has the token; return why there is no place for it."""


class WorkerEnd(Connection):
    """A connection from one router to one worker."""

    def __init__(
        self,
        secret: Secret,
        limits: WorkerLimits,
        *,
        find: Callable[[WorkerId, Epoch], Served | None],
        on_refused: Callable[[str], None],
        door: Door,
    ) -> None:
        super().__init__(
            kinds=TO_WORKER,
            heartbeat_s=limits.heartbeat_s,
            dead_after_s=limits.dead_after_s,
            write_max_bytes=limits.write_max_bytes,
        )
        self._secret = secret
        self._limits = limits
        self._find = find
        self._tell_refused = on_refused
        self._door = door
        self._nonce = new_nonce()
        self._served: Served | None = None
        self._router = ""
        self._answers: dict[int, TcpAnswer] = {}
        self._last_id = -1
        self._items: list[Item] = []
        self._items_tokens = 0
        self._hello_timer: asyncio.TimerHandle | None = None
        self.handlers |= {
            Kind.OPEN: self._on_open,
            Kind.CREDIT: self._on_credit,
            Kind.CANCEL: self._on_cancel,
        }

    # Hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, and wait for a hello."""
        super().connection_made(transport)
        self.send_raw(greeting(self._nonce))
        self._hello_timer = self.loop.call_later(self._limits.hello_within_s, self._no_hello)
        self._door.arrived(self)

    def read_opening(self, data: bytearray) -> int | None:
        """Welcome a router that knows the token, and wants a worker that is here."""
        said = read_hello(data)
        if said is None:
            return None
        self._end_hello_timer()
        proof = self._secret.router_proof(self._nonce, said.nonce, said.worker_id, said.incarnation)
        if not hmac.compare_digest(proof, said.proof):
            raise ProtocolError("the router does not know the token", param="token")
        served = self._find(said.worker_id, said.incarnation)
        refusal = self._door.admit(self)
        if refusal is not None:
            self.refuse(refusal)
        elif served is None:
            self.close(f"worker {said.worker_id}/{said.incarnation} is not served here")
        else:
            self._welcome(served, said)
        return HELLO_BYTES

    def _welcome(self, served: Served, said: Hello) -> None:
        self._served = served
        self._router = said.nonce.hex()  # what its legs are called by: no other connection has it
        served.ends.add(self)
        self.send(
            Kind.WELCOME,
            self._secret.worker_proof(self._nonce, said.nonce, said.worker_id, said.incarnation),
        )

    def _end_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _no_hello(self) -> None:
        self.refuse(f"no hello within {self._limits.hello_within_s:g} s")

    def refuse(self, reason: str) -> None:
        """The router may not come in, or did what the protocol does not allow."""
        self._tell_refused(f"{self.peer}: {reason}")
        super().refuse(reason)

    # What the router says

    def _on_open(self, body: bytes) -> None:
        opened = decode(open_decoder, body, "open")
        if opened.stream_id <= self._last_id:
            raise ProtocolError(f"stream {opened.stream_id} was used before", param="stream_id")
        self._last_id = opened.stream_id
        if self._served is None:
            raise ProtocolError("a leg came before the hello", param="kind")
        try:
            if len(self._answers) >= self._limits.streams_max:
                raise WorkerFull(f"{self._limits.streams_max} streams are open on this connection")
            request = decode_request(memoryview(opened.request))
        except KvrouterError as error:
            self.send(Kind.REFUSED, encode_refused(opened.stream_id, error))
            return
        stream_id = opened.stream_id
        answer = self._answers[stream_id] = TcpAnswer(self, stream_id, opened.credit_tokens)
        serving = self._served.place.run(LegName(self._router, stream_id), request, answer)
        answer.task = go_on(serving, name="requests: serve a leg")
        answer.task.add_done_callback(lambda _task: self._answers.pop(stream_id, None))

    def _on_credit(self, body: bytes) -> None:
        for stream_id, tokens in decode(credits_decoder, body, "credit"):
            answer = self._answers.get(stream_id)
            if answer is not None:  # else it ended while its credit was on the way
                answer.add_credit(tokens)

    def _on_cancel(self, body: bytes) -> None:
        cancelled = decode(cancel_decoder, body, "cancel")
        if self._served is not None:
            self._served.place.cancel(LegName(self._router, cancelled.stream_id), cancelled.reason)
        answer = self._answers.get(cancelled.stream_id)
        if answer is not None and answer.task is not None:
            answer.task.cancel()  # also where the place has not seen the leg yet

    # What legs bring

    def bring_tokens(self, stream_id: int, token_ids: tuple[int, ...]) -> None:
        """Send bare tokens with the others of this turn."""
        self._items.append((stream_id, token_ids, None))
        self._items_tokens += ITEM_TOKENS + len(token_ids)
        if self._items_tokens >= CHUNKS_FLUSH_TOKENS:
            self.gather()
        if not self.is_flush_due:  # as flush_soon does: this is done for every token of every answer
            self.flush_soon()

    def bring(self, stream_id: int, chunk: EngineChunk) -> None:
        """Send a chunk with the others of this turn; raise ProtocolError for what cannot travel."""
        if is_bare(chunk):
            self.bring_tokens(stream_id, chunk.token_ids)
            return
        body = whole_chunk(chunk)
        self._items.append((stream_id, (), msgspec.Raw(body)))
        self._items_tokens += ITEM_TOKENS + len(body) // 4
        if self._items_tokens >= CHUNKS_FLUSH_TOKENS:
            self.gather()
        self.flush_soon()

    def gather(self) -> None:
        """Put what all legs brought into one frame."""
        if self._items:
            items, self._items = self._items, []
            self._items_tokens = 0
            try:
                body = encode_items(items)
            except (TypeError, OverflowError) as error:  # an engine's adapter brought no plain integers
                self.loop.call_exception_handler({"message": "tokens cannot travel", "exception": error})
                self.abort("the worker's engine brought tokens that cannot travel")
                return
            self.send(Kind.CHUNKS, body)

    def resume_writing(self) -> None:
        """The router has read on: so do the legs."""
        super().resume_writing()
        for answer in self._answers.values():
            answer.go_on()

    # Life

    def ended(self, reason: str) -> None:
        """Whatever ran for the router is cancelled: nobody else can read it."""
        self._end_hello_timer()
        served, self._served = self._served, None
        if served is None:
            return
        served.ends.discard(self)
        served.place.drop_router(self._router, CONNECTION_CLOSED if reason == LEFT else reason)
        for answer in self._answers.values():
            if answer.task is not None:
                answer.task.cancel()
