"""The session of a router with a worker, as a state machine without I/O; the router's end.

A pipe passes in received bytes (:meth:`Session.receive`) and the time (:meth:`Session.tick`), and takes the
output (:meth:`Session.take_output`) after ``wake``. It is sent as one run of bytes, of one turn at most. A
session uses no clock, socket or task. See ``docs/wire.md``; ``worker_session`` has the worker's end.
"""

import hmac
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import ConfigError, InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.json import unpacked
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.transports.requests.encoding import REQUEST_MAX_BYTES, ErrorMessage, encode_request, error_of
from kvrouter.transports.requests.frames import (
    GREETED,
    HEADER,
    TO_ROUTER,
    FrameKind,
    FrameReader,
    Open,
    encode_cancel,
    encode_credits,
    goodbye,
    items_decoder,
    number_decoder,
    refused_decoder,
)
from kvrouter.transports.requests.handshake import GREETING_BYTES, Secret, hello, read_greeting
from kvrouter.transports.requests.port import ReaderTooSlow, WorkerFull, WorkerUnreachable

STREAMS_MAX = 8192
"""Legs of one session at once."""

UNREAD_MAX_BYTES = 128 * 1024 * 1024
"""Unread bytes above which the peer is given up."""

READING_MAX_BYTES = 512 * 1024 * 1024
"""Bytes of incomplete requests, over all routers of one acceptor."""

READING_FULL = "full: too many bytes of requests are being read"

LEFT = "the connection was closed"


class Session:
    """The common part of both ends: frames, liveness, an end with a reason.

    ``pending`` has the items that :meth:`gather` puts into frames, as long as there are any.
    ``wake`` is called when the session has output after having none. A session that ended has ``is_closed``;
    the pipe then sends the remaining output with a goodbye, and ends, or ends at once if ``is_lost``.
    Incomplete frames count towards the shared ``budget``: when it is full, the session with most of it ends.
    """

    def __init__(
        self,
        *,
        kinds: Mapping[int, int],
        has_opening: bool,
        dead_after_s: float,
        pending: Sized,
        wake: Callable[[], object],
        budget: ByteBudget | None = None,
    ) -> None:
        self.is_closed = False
        self.is_lost = False
        self.was_refused = False
        self.handlers: dict[int, Callable[[bytes], None]] = {
            FrameKind.PING: self._on_ping,
            FrameKind.PONG: self._on_pong,
            FrameKind.GOODBYE: self._on_goodbye,
        }
        self.is_flush_due = False
        self._pending = pending
        self._wake = wake
        self._reader = FrameReader(kinds)
        self._opening: bytearray | None = bytearray() if has_opening else None
        self._out: list[bytes] = []
        self._has_connection = has_opening
        self._budget = budget
        self._held_bytes = 0
        self._dead_after_s = dead_after_s
        self._has_received = True
        self._received_s = 0.0
        self._has_sent = False

    def read_opening(self, data: bytearray) -> int | None:
        """Return the length of the peer's opening, None while it is incomplete; raise ProtocolError."""
        raise NotImplementedError

    def gather(self) -> None:
        """Put pending items into a frame, before any other frame is sent."""
        raise NotImplementedError

    def ended(self, reason: str) -> None:
        """Handle the end of the session; called once."""
        raise NotImplementedError

    # Reading

    def read_only(self, kinds: Mapping[int, int]) -> None:
        """Allow only frames of these kinds from now on, each with its largest body in bytes."""
        self._reader.kinds = kinds

    def receive(self, data: bytes) -> None:
        """Take received bytes, split anywhere."""
        self._has_received = True
        if self.is_closed:
            return
        try:
            if self._opening is not None:
                self._opening += data
                used = self.read_opening(self._opening)
                if used is None:
                    return
                data = bytes(self._opening[used:])
                self._opening = None
            for kind, body in self._reader.feed(data):
                handler = self.handlers.get(kind)
                if handler is None:  # the frame before ended the session
                    break
                handler(body)
        except ProtocolError as error:
            self.refuse(error.message)
        if self._budget is not None and self._held_bytes != self._reader.held_bytes:
            self._held_bytes = self._reader.held_bytes
            self._budget.hold(self, self._held_bytes)

    def shed(self) -> None:
        """End the session: the shared budget is full, and this session holds most of it."""
        self.refuse(READING_FULL)

    def refuse(self, reason: str) -> None:
        """End the session because of a protocol error of the peer."""
        self.was_refused = True
        self.close(reason)

    def _on_ping(self, _: bytes) -> None:
        self.send(FrameKind.PONG)

    def _on_pong(self, _: bytes) -> None:
        pass

    def _on_goodbye(self, body: bytes) -> None:
        self.was_refused = True
        self._end(body.decode("utf-8", "replace") or LEFT)

    # Writing

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Queue a frame for the end of this turn."""
        if self.is_closed:
            return
        if self._pending:
            self.gather()
            if self.is_lost:  # the gathered items could not be encoded
                return
        self._out.append(HEADER.pack(len(body), kind) + body)
        if not self.is_flush_due:  # inlined from flush_soon: this runs for every leg
            self.is_flush_due = True
            self._wake()

    def send_raw(self, data: bytes) -> None:
        """Queue bytes that are no frame: an opening."""
        self._out.append(data)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Ask the pipe to take the output at the end of this turn."""
        if not self.is_flush_due:
            self.is_flush_due = True
            self._wake()

    @property
    def waiting_bytes(self) -> int:
        """The bytes of output that the pipe has not taken."""
        return sum(map(len, self._out))

    def take_output(self) -> bytes:
        """Return the pending output, in order."""
        if self._pending and not self.is_closed:
            self.gather()
        self.is_flush_due = False
        out = self._out
        if not out:
            return b""
        self._has_sent = True
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    # Life

    def tick(self, now_s: float) -> None:
        """Check liveness once per heartbeat. ``now_s`` excludes time in which this process could not receive.

        A peer that sent something since the last tick is alive. A silent peer is pinged, and is lost after
        ``dead_after_s``; an end without output sends a PONG, so that the other end need not ping.
        """
        if self._has_received:
            self._has_received = False
            self._received_s = now_s
        silent_s = now_s - self._received_s
        if silent_s >= self._dead_after_s:
            self.give_up(f"nothing was heard for {self._dead_after_s:g} s")
            return
        if self._opening is None and silent_s > 0:
            self.send(FrameKind.PING)
        elif self._opening is None and not self._has_sent:
            self.send(FrameKind.PONG)
        self._has_sent = False

    def close(self, reason: str) -> None:
        """End with a reason, after all earlier output. Idempotent."""
        if self._pending and not self.is_closed:
            self.gather()
        if not (self.is_closed or self.is_lost):  # gathering may have ended the session
            self._out.append(goodbye(reason))
            self._end(reason)

    def give_up(self, reason: str) -> None:
        """End because the peer seems to be gone. Idempotent.

        A lost connection ends the session at both ends. Over messages a goodbye is sent, so that a peer that
        is alive cancels its legs.
        """
        if self._has_connection:
            self.lose(reason)
        else:
            self.close(reason)

    def lose(self, reason: str) -> None:
        """End at once, without output: the peer is not expected to read. Idempotent."""
        self.is_lost = True
        self._out.clear()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._reader.drop()
            self.handlers.clear()
            if self._budget is not None:
                self._budget.hold(self, 0)
            self.ended(reason)
            self.flush_soon()


class RouterStream(Protocol):
    """The stream of one leg, as its router session fills it."""

    @property
    def is_accepted(self) -> bool:
        """Whether the worker accepted the leg."""

    def accept(self) -> None:
        """Record that the worker accepted the leg."""

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Add bare tokens from the worker. Raises ProtocolError above the credit."""

    def push(self, chunk: EngineChunk) -> None:
        """Add a chunk from the worker. Raises ProtocolError above the credit."""

    def fail(self, error: KvrouterError) -> None:
        """End the stream with an error: the leg was refused or failed."""

    def break_off(self, why: str) -> None:
        """End the stream: the worker is lost."""

    def withdraw(self, error: KvrouterError) -> None:
        """End the stream with an error of this end, and cancel the leg."""

    def unread_for_s(self, now_s: float) -> float:
        """Seconds for which chunks have waited without a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """The limits of a router's end. Raises ConfigError for a stream without credit.

    A worker must accept a leg within ``open_timeout_s``. A peer that is silent for ``dead_after_s`` is lost;
    it is pinged every ``heartbeat_s``. A stream holds at most ``stream_credit_tokens``, and is cancelled when
    its reader reads nothing for ``slow_stream_limit_s``. A connection has at most ``streams_max`` streams;
    while waiting requests fill half of ``write_max_bytes``, the worker counts as full. An unused connection
    is closed after ``idle_close_s``.
    """

    open_timeout_s: float = 5.0
    heartbeat_s: float = 2.0
    dead_after_s: float = 6.0
    slow_stream_limit_s: float = 60.0
    idle_close_s: float = 60.0
    stream_credit_tokens: int = 1024
    streams_max: int = STREAMS_MAX
    write_max_bytes: int = UNREAD_MAX_BYTES

    def __post_init__(self) -> None:
        if self.stream_credit_tokens < 1:
            raise ConfigError("stream_credit_tokens: must be at least 1", param="stream_credit_tokens")


ROUTER_LIMITS = RouterLimits()
"""The default limits of a router's end."""


@dataclass(frozen=True, slots=True)
class RouterHello:
    """The router's part of the handshake over a byte stream; ``nonce`` is a number used once."""

    secret: Secret
    nonce: bytes
    worker_id: WorkerId
    incarnation: Epoch

    def worker_proof(self, worker_nonce: bytes) -> bytes:
        """Return the proof that the worker must send."""
        return self.secret.worker_proof(worker_nonce, self.nonce, self.worker_id, self.incarnation)


Stream = TypeVar("Stream", bound=RouterStream)


class RouterSession(Session, Generic[Stream]):
    """The router's end: opens legs, and fills their streams with the worker's chunks.

    ``address`` is used in messages to people. Without a ``router_hello`` the session is open at once.
    ``on_welcome`` is called when legs may be opened, ``on_end`` with the reason when the session ends,
    ``on_refused`` with a protocol error of the worker.
    """

    def __init__(
        self,
        address: str,
        limits: RouterLimits,
        *,
        router_hello: RouterHello | None,
        new_stream: "Callable[[RouterSession[Stream], int, int, EngineRequest], Stream]",
        wake: Callable[[], object],
        is_wanted: Callable[[], bool],
        on_welcome: Callable[[], None],
        on_end: Callable[[str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._credits_tokens: dict[int, int] = {}
        super().__init__(
            kinds=TO_ROUTER if router_hello is None else GREETED,
            has_opening=router_hello is not None,
            dead_after_s=limits.dead_after_s,
            pending=self._credits_tokens,
            wake=wake,
        )
        self.address = address
        self._hello = router_hello
        self._limits = limits
        self._new_stream = new_stream
        self._is_wanted = is_wanted
        self._report_welcome = on_welcome
        self._report_end = on_end
        self._report_refused = on_refused
        self._is_welcome = router_hello is None
        self._worker_nonce = b""
        self._streams: dict[int, Stream] = {}
        self._next_id = 0
        self._idle_since_s: float | None = None
        self.handlers |= {
            FrameKind.WELCOME: self._on_welcome,
            FrameKind.ACCEPTED: self._on_accepted,
            FrameKind.REFUSED: self._on_failed,
            FrameKind.CHUNKS: self._on_chunks,
            FrameKind.FAILED: self._on_failed,
        }

    # Hello

    def read_opening(self, data: bytearray) -> int | None:
        """Answer the worker's greeting with a hello."""
        nonce = read_greeting(data)
        if nonce is None or self._hello is None:
            return None
        self._worker_nonce = nonce
        own = self._hello
        self.send_raw(hello(own.secret, nonce, own.nonce, own.worker_id, own.incarnation))
        return GREETING_BYTES

    def _on_welcome(self, proof: bytes) -> None:
        if self._hello is None or not hmac.compare_digest(
            proof, self._hello.worker_proof(self._worker_nonce)
        ):
            raise ProtocolError("the worker does not know the token", param="token")
        self.read_only(TO_ROUTER)
        self._is_welcome = True
        self._report_welcome()

    def refuse(self, reason: str) -> None:
        """End the session because of a protocol error of the worker."""
        if self._is_welcome:  # else the caller that connects gets the error
            self._report_refused(f"{self.address}: {reason}")
        super().refuse(reason)

    # Legs

    def open(self, request: EngineRequest, written_bytes: int) -> Stream:
        """Send ``request``; the stream shows whether the worker accepts it.

        ``written_bytes`` of this session's earlier output wait in its pipe. Raises WorkerUnreachable when the
        request cannot be sent, InvalidRequest when it is too large.
        """
        limits = self._limits
        if self.is_closed:
            raise WorkerUnreachable(f"{self.address}: the connection was lost")
        if len(self._streams) >= limits.streams_max:
            raise WorkerFull(f"{self.address}: {limits.streams_max} streams are open")
        stream_id = self._next_id
        body = encode_request(Open(stream_id, limits.stream_credit_tokens, request))
        if len(body) > REQUEST_MAX_BYTES:
            raise InvalidRequest(
                f"token_ids: the request has {len(body)} bytes, over the {REQUEST_MAX_BYTES} allowed",
                param="token_ids",
            )
        waiting_bytes = written_bytes + self.waiting_bytes
        if waiting_bytes and waiting_bytes + len(body) > limits.write_max_bytes // 2:
            raise WorkerFull(f"{self.address}: {waiting_bytes} bytes wait to be read there")
        self._next_id += 1
        stream = self._streams[stream_id] = self._new_stream(
            self, stream_id, limits.stream_credit_tokens, request
        )
        self.send(FrameKind.OPEN, body)
        return stream

    @property
    def n_streams(self) -> int:
        """The number of open legs."""
        return len(self._streams)

    def give_credit(self, stream_id: int, tokens: int) -> None:
        """Give the worker credit for ``tokens`` more."""
        self._credits_tokens[stream_id] = self._credits_tokens.get(stream_id, 0) + tokens
        self.flush_soon()

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        """Cancel a stream, or free the KV that its ended leg left at the worker."""
        self._streams.pop(stream_id, None)
        self._credits_tokens.pop(stream_id, None)
        self.send(FrameKind.CANCEL, encode_cancel(stream_id, reason))

    def refuse_unaccepted(self, why: str) -> None:
        """Fail all legs that the worker has not accepted yet."""
        for stream in tuple(self._streams.values()):
            if not stream.is_accepted:
                stream.withdraw(WorkerUnreachable(why))

    def gather(self) -> None:
        """Send the credit of all streams in one frame."""
        body = encode_credits(self._credits_tokens)
        self._credits_tokens.clear()
        self.send(FrameKind.CREDIT, body)

    # Frames of the worker

    def _on_chunks(self, body: bytes) -> None:
        streams = self._streams
        for stream_id, token_ids, chunk in unpacked(items_decoder, body, "chunks"):
            stream = streams.get(stream_id)
            if stream is None:  # cancelled here while its tokens were on their way
                continue
            if chunk is None:
                stream.push_tokens(token_ids)
            else:
                stream.push(chunk)
                if chunk.finish is not None:
                    del streams[stream_id]

    def _on_accepted(self, body: bytes) -> None:
        stream = self._streams.get(unpacked(number_decoder, body, "accepted"))
        if stream is not None:
            stream.accept()

    def _on_failed(self, body: bytes) -> None:
        stream_id, error = _error(body)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.fail(error)

    # Life

    def tick(self, now_s: float) -> None:
        """Check liveness; also cancel streams with a slow reader, and close an unused session."""
        super().tick(now_s)
        limits = self._limits
        for stream in tuple(self._streams.values()):
            if stream.unread_for_s(now_s) >= limits.slow_stream_limit_s:
                stream.withdraw(
                    ReaderTooSlow(f"its reader took nothing for {limits.slow_stream_limit_s:g} s")
                )
        if self._streams or self._is_wanted():
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= limits.idle_close_s:
            self.close("nothing was asked for a while")

    def ended(self, reason: str) -> None:
        """Fail all legs: those not accepted as unreachable, the others as broken."""
        why = f"{self.address}: {reason}"
        streams, self._streams = self._streams, {}
        self._credits_tokens.clear()
        self._report_end(why)
        for stream in streams.values():
            stream.break_off(why)


def _error(body: bytes) -> tuple[int, KvrouterError]:
    refused = unpacked(refused_decoder, body, "refused")
    return refused.stream_id, error_of(
        ErrorMessage(refused.code, refused.message, refused.param, refused.answer)
    )
