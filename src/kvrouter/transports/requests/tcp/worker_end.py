"""The worker's end of one tcp connection: runs legs and sends their chunks within credit."""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.transports.background import go_on
from kvrouter.transports.requests.legs import CONNECTION_CLOSED, LegName, LegServer
from kvrouter.transports.requests.port import WorkerFull
from kvrouter.transports.requests.stream import decode_request, is_bare
from kvrouter.transports.requests.tcp.connection import LEFT, Connection
from kvrouter.transports.requests.tcp.frames import (
    CHUNKS_FLUSH_TOKENS,
    HELLO_BYTES,
    TO_WORKER,
    FrameKind,
    Hello,
    Item,
    Secret,
    cancel_decoder,
    credit_of,
    credits_decoder,
    decode,
    encode_items,
    encode_number,
    encode_refused,
    greeting,
    new_nonce,
    open_decoder,
    read_hello,
    whole_chunk,
)


class AnswerSink(Protocol):
    """The connection, as an answer sees it."""

    is_choked: bool
    """Whether more bytes wait for the router than should."""

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send a frame with the others of this turn."""

    def bring_tokens(self, stream_id: int, token_ids: tuple[int, ...]) -> None:
        """Send bare tokens with the others of this turn."""

    def bring(self, stream_id: int, chunk: EngineChunk) -> None:
        """Send a chunk with the others of this turn; raise ProtocolError for what cannot travel."""


class TcpAnswer:
    """What one leg answers: chunks that are cut to the credit its router gave."""

    __slots__ = ("_credit_tokens", "_is_accepted", "_more", "_sink", "stream_id", "task")

    def __init__(self, sink: AnswerSink, stream_id: int, credit_tokens: int) -> None:
        self.stream_id = stream_id
        self.task: asyncio.Task[None] | None = None
        self._sink = sink
        self._credit_tokens = credit_tokens
        self._is_accepted = False
        self._more: asyncio.Future[None] | None = None

    def add_credit(self, tokens: int) -> None:
        """The router takes ``tokens`` more."""
        self._credit_tokens += tokens
        self.go_on()

    def go_on(self) -> None:
        """There is credit, or room to write."""
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def accept(self) -> None:
        """Say so."""
        self._is_accepted = True
        self._sink.send(FrameKind.ACCEPTED, encode_number(self.stream_id))

    def take(self, chunk: EngineChunk) -> bool:
        """Send bare tokens, if there is credit for all of them and room to write: what most chunks are."""
        if not is_bare(chunk):
            return False
        n_tokens = len(chunk.token_ids) or 1
        if n_tokens > self._credit_tokens or self._sink.is_choked:
            return False
        self._credit_tokens -= n_tokens
        self._sink.bring_tokens(self.stream_id, chunk.token_ids)
        return True

    async def send(self, chunk: EngineChunk) -> None:
        """Send, in parts where there is credit for a part only."""
        self._bring(await self._fitting(chunk))

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send, in parts where there is credit for a part only; the leg is over with the last one."""
        last = await self._fitting(chunk)
        over()
        self._bring(last)

    async def end(self, error: Exception) -> None:
        """Refuse, or say that the leg is lost."""
        kind = FrameKind.FAILED if self._is_accepted else FrameKind.REFUSED
        self._sink.send(kind, encode_refused(self.stream_id, error))

    def _bring(self, chunk: EngineChunk) -> None:
        self._credit_tokens -= credit_of(chunk)
        self._sink.bring(self.stream_id, chunk)

    async def _fitting(self, chunk: EngineChunk) -> EngineChunk:
        """Send what ``chunk`` has above the credit as credit comes; return the rest once it may go.

        The first part carries the cached tokens, the last an end. An engine's own bytes are no parts.
        """
        while True:
            n_tokens = credit_of(chunk)
            await self._wait_for_room(n_tokens)
            if n_tokens <= self._credit_tokens:
                return chunk
            part = EngineChunk(chunk.token_ids[: self._credit_tokens], cached_tokens=chunk.cached_tokens)
            chunk = replace(chunk, token_ids=chunk.token_ids[self._credit_tokens :], cached_tokens=None)
            self._bring(part)

    async def _wait_for_room(self, n_tokens: int) -> None:
        """Wait until some of ``n_tokens`` may be sent."""
        while self._sink.is_choked or (self._credit_tokens <= 0 and n_tokens > 0):
            self._more = asyncio.get_running_loop().create_future()
            try:
                await self._more
            finally:
                self._more = None


ITEM_TOKENS = 64
"""What an item counts in addition to its tokens towards a full frame."""


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

    place: LegServer
    ends: "set[WorkerEnd]"


class ConnectionCounter(Protocol):
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
        counter: ConnectionCounter,
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
        self._report_refused = on_refused
        self._counter = counter
        self._nonce = new_nonce()
        self._served: Served | None = None
        self._router = ""
        self._answers: dict[int, TcpAnswer] = {}
        self._last_id = -1
        self._items: list[Item] = []
        self._items_tokens = 0
        self._hello_timer: asyncio.TimerHandle | None = None
        self.handlers |= {
            FrameKind.OPEN: self._on_open,
            FrameKind.CREDIT: self._on_credit,
            FrameKind.CANCEL: self._on_cancel,
        }

    # Hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, and wait for a hello."""
        super().connection_made(transport)
        self.send_raw(greeting(self._nonce))
        self._hello_timer = self.loop.call_later(self._limits.hello_within_s, self._no_hello)
        self._counter.arrived(self)

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
        refusal = self._counter.admit(self)
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
            FrameKind.WELCOME,
            self._secret.worker_proof(self._nonce, said.nonce, said.worker_id, said.incarnation),
        )

    def _end_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _no_hello(self) -> None:
        self.refuse(f"no hello within {self._limits.hello_within_s:g} s")

    def refuse(self, reason: str) -> None:
        """The router may not come in, or did what the protocol does not allow."""
        self._report_refused(f"{self.peer}: {reason}")
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
            self.send(FrameKind.REFUSED, encode_refused(opened.stream_id, error))
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
            self.send(FrameKind.CHUNKS, body)

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
