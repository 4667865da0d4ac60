"""The worker's end of a session, as a state machine: starts legs, and sends their chunks within credit."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec.structs import replace

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.json import unpacked
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.transports.listener import ListenerLimits
from kvrouter.transports.requests.encoding import credit_of, decode_request, is_bare
from kvrouter.transports.requests.frames import (
    CHUNKS_FLUSH_TOKENS,
    HEADER,
    ITEM_TOKENS,
    TO_WORKER,
    FrameKind,
    Item,
    Open,
    UnreadOpen,
    cancel_decoder,
    credits_decoder,
    encode_checked_chunk,
    encode_refused,
    encoder,
    open_decoder,
    unread_open_decoder,
)
from kvrouter.transports.requests.handshake import HELLO_BYTES, Hello, Secret, greeting, read_hello
from kvrouter.transports.requests.port import StreamBroken, WorkerFull
from kvrouter.transports.requests.session import STREAMS_MAX, UNREAD_MAX_BYTES, Session


class Answer:
    """The answer of one leg: chunks within the credit that its router gave."""

    __slots__ = ("_credit_tokens", "_session", "stream_id")

    def __init__(self, session: "WorkerSession", stream_id: int, credit_tokens: int) -> None:
        self.stream_id = stream_id
        self._session = session
        self._credit_tokens = credit_tokens

    def add_credit(self, tokens: int) -> None:
        """Add credit for ``tokens`` more."""
        self._credit_tokens += tokens
        self.resume()

    def resume(self) -> None:
        """Called on new credit, or room to write."""

    def take(self, chunk: EngineChunk) -> bool:
        """Send bare tokens, if there is credit and room to write; return whether they were sent."""
        if not is_bare(chunk):
            return False
        n_tokens = len(chunk.token_ids) or 1
        if n_tokens > self._credit_tokens or self._session.is_paused:
            return False
        self._credit_tokens -= n_tokens
        self._session.send_tokens(self.stream_id, chunk.token_ids)
        return True

    def has_room(self, n_tokens: int) -> bool:
        """Whether some of ``n_tokens`` may be sent."""
        return not self._session.is_paused and (self._credit_tokens > 0 or n_tokens == 0)

    def rest_of(self, chunk: EngineChunk) -> EngineChunk | None:
        """Send the first part of ``chunk``, as long as the credit; return the rest, None if all of it fits.

        The first part carries the counts of the prompt, the last the finish. Raw bytes are never split.
        """
        if credit_of(chunk) <= self._credit_tokens:
            return None
        at = self._credit_tokens
        first = EngineChunk(chunk.token_ids[:at], cached_tokens=chunk.cached_tokens, kv_bytes=chunk.kv_bytes)
        self.send_chunk(first)
        return replace(chunk, token_ids=chunk.token_ids[at:], cached_tokens=None, kv_bytes=None)

    def send_chunk(self, chunk: EngineChunk) -> None:
        """Send a chunk within credit; raise ProtocolError for one that cannot be encoded."""
        self._credit_tokens -= credit_of(chunk)
        self._session.send_chunk(self.stream_id, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits(ListenerLimits):
    """The limits of a worker's end.

    A router that is silent for ``dead_after_s`` is lost; it is pinged every ``heartbeat_s``. It has at most
    ``streams_max`` legs, and at most ``write_max_bytes`` unread.
    """

    heartbeat_s: float = 2.0
    dead_after_s: float = 6.0
    streams_max: int = STREAMS_MAX
    write_max_bytes: int = UNREAD_MAX_BYTES


WORKER_LIMITS = WorkerLimits()
"""The default limits of a worker's end."""


class WorkerSide(Protocol):
    """Runs the legs that a router opens at a worker's session."""

    def begin(self, stream_id: int, credit_tokens: int, request: EngineRequest) -> Answer:
        """Start to serve a leg."""

    def cancel(self, stream_id: int, reason: str) -> None:
        """Cancel a leg, or free the KV of an ended prefill leg."""

    def ended(self, reason: str) -> None:
        """Cancel all legs of this session: it has ended."""


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The worker's part of the handshake over a byte stream; ``nonce`` is a number used once.

    ``admit`` is called for a router with the token; it returns the runner of its legs, or why it is refused.
    """

    secret: Secret
    nonce: bytes
    admit: Callable[[Hello], WorkerSide | str]


class WorkerSession(Session):
    """The worker's end: starts legs, and sends their chunks within credit.

    Without a ``worker_hello`` the session is open at once, and ``side`` has to be set. ``on_refused`` gets a
    protocol error of the router; ``on_mistake`` an engine's tokens other than plain integers.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        worker_hello: WorkerHello | None,
        wake: Callable[[], object],
        on_refused: Callable[[str], None],
        on_mistake: Callable[[str, Exception], None],
        budget: ByteBudget | None = None,
    ) -> None:
        self._items: list[Item] = []
        super().__init__(
            kinds=TO_WORKER,
            has_opening=worker_hello is not None,
            dead_after_s=limits.dead_after_s,
            pending=self._items,
            wake=wake,
            budget=budget,
        )
        self.side: WorkerSide | None = None
        self.is_paused = False
        self._limits = limits
        self._hello = worker_hello
        self._report_refused = on_refused
        self._report_mistake = on_mistake
        self._answers: dict[int, Answer] = {}
        self._last_id = -1
        self._items_tokens = 0
        self.handlers |= {
            FrameKind.OPEN: self._on_open,
            FrameKind.CREDIT: self._on_credit,
            FrameKind.CANCEL: self._on_cancel,
        }
        if worker_hello is not None:
            self.send_raw(greeting(worker_hello.nonce))

    # Hello

    def read_opening(self, data: bytearray) -> int | None:
        """Accept a router that has the token and wants a worker that is served here."""
        hello = read_hello(data)
        if hello is None or self._hello is None:
            return None
        secret, nonce = self._hello.secret, self._hello.nonce
        proof = secret.router_proof(nonce, hello.nonce, hello.worker_id, hello.incarnation)
        if not hmac.compare_digest(proof, hello.proof):
            raise ProtocolError("the router does not know the token", param="token")
        admitted = self._hello.admit(hello)
        if isinstance(admitted, str):
            self.close(admitted)
        else:
            self.side = admitted
            proof = secret.worker_proof(nonce, hello.nonce, hello.worker_id, hello.incarnation)
            self.send(FrameKind.WELCOME, proof)
        return HELLO_BYTES

    def refuse(self, reason: str) -> None:
        """End the session because of a protocol error or a wrong token of the router."""
        if not self.is_closed:
            self._report_refused(reason)
        super().refuse(reason)

    # Frames of the router

    def _on_open(self, body: bytes) -> None:
        opened: Open | UnreadOpen
        try:
            opened = unpacked(open_decoder, body, "open")
        except ProtocolError:
            opened = unpacked(unread_open_decoder, body, "open")
        stream_id = opened.stream_id
        if stream_id <= self._last_id:
            raise ProtocolError(f"stream {stream_id} was used before", param="stream_id")
        self._last_id = stream_id
        if self.side is None:
            raise ProtocolError("a leg came before the hello", param="kind")
        try:
            if len(self._answers) >= self._limits.streams_max:
                raise WorkerFull(f"{self._limits.streams_max} streams are open on this connection")
            request = opened.request
            if isinstance(request, msgspec.Raw):
                request = decode_request(memoryview(request))
        except KvrouterError as error:
            self.fail(stream_id, error, is_accepted=False)
            return
        self._answers[stream_id] = self.side.begin(stream_id, opened.credit_tokens, request)

    def _on_credit(self, body: bytes) -> None:
        for stream_id, tokens in unpacked(credits_decoder, body, "credit"):
            answer = self._answers.get(stream_id)
            if answer is not None:  # else it ended while its credit was on the way
                answer.add_credit(tokens)

    def _on_cancel(self, body: bytes) -> None:
        cancelled = unpacked(cancel_decoder, body, "cancel")
        if self.side is not None:
            self.side.cancel(cancelled.stream_id, cancelled.reason)

    # Output of legs

    def accept(self, stream_id: int) -> None:
        """Send that the worker accepted a leg."""
        self.send(FrameKind.ACCEPTED, encoder.encode(stream_id))

    def fail(self, stream_id: int, error: Exception, *, is_accepted: bool) -> None:
        """Send that the worker refused a leg, or lost it."""
        kind = FrameKind.FAILED if is_accepted else FrameKind.REFUSED
        self.send(kind, encode_refused(stream_id, error))

    def forget(self, stream_id: int) -> None:
        """Forget an ended leg."""
        self._answers.pop(stream_id, None)

    def send_tokens(self, stream_id: int, token_ids: tuple[int, ...]) -> None:
        """Queue bare tokens for the frame of this turn."""
        self._items.append((stream_id, token_ids, None))
        self._items_tokens += ITEM_TOKENS + len(token_ids)
        if self._items_tokens >= CHUNKS_FLUSH_TOKENS:
            self.gather()
        if not self.is_flush_due:  # inlined from flush_soon: this runs for every token of every answer
            self.flush_soon()

    def send_chunk(self, stream_id: int, chunk: EngineChunk) -> None:
        """Queue a chunk for the frame of this turn; raise ProtocolError for one that cannot be encoded."""
        if is_bare(chunk):
            self.send_tokens(stream_id, chunk.token_ids)
            return
        body = encode_checked_chunk(chunk)
        self._items.append((stream_id, (), msgspec.Raw(body)))
        self._items_tokens += ITEM_TOKENS + len(body) // 4
        if self._items_tokens >= CHUNKS_FLUSH_TOKENS:
            self.gather()
        self.flush_soon()

    def gather(self) -> None:
        """Put the queued items of all legs into one frame."""
        self._items_tokens = 0
        try:
            body = encoder.encode(self._items)
        except (TypeError, OverflowError) as error:  # an engine returned tokens that are no integers
            self._report_mistake("tokens cannot travel", error)
            self._gather_each()
            return
        self._items.clear()
        if not self.is_closed:
            self._out.append(HEADER.pack(len(body), FrameKind.CHUNKS) + body)

    def _gather_each(self) -> None:
        """Send the items that can be encoded; fail the legs of the others."""
        items = self._items[:]
        self._items.clear()
        good: list[Item] = []
        failed: dict[int, None] = {}
        for item in items:
            if item[0] in failed:
                continue
            try:
                encoder.encode([item])
            except (TypeError, OverflowError):
                failed[item[0]] = None
            else:
                good.append(item)
        if good:
            self.send(FrameKind.CHUNKS, encoder.encode(good))
        for stream_id in failed:
            error = StreamBroken("the worker's engine brought tokens that cannot travel")
            self.fail(stream_id, error, is_accepted=True)
            if self.side is not None:
                self.side.cancel(stream_id, error.message)

    def pause(self) -> None:
        """Pause the legs: too many bytes wait for the router."""
        self.is_paused = True

    def resume(self) -> None:
        """Resume the legs: the router has read."""
        self.is_paused = False
        for answer in self._answers.values():
            answer.resume()

    # Life

    def ended(self, reason: str) -> None:
        """Cancel all legs of the router: it was their only reader."""
        if self.side is not None:
            self.side.ended(reason)
