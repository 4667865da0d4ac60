"""The router's end of one tcp connection: opens legs and gives what comes back to their readers."""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.requests import EngineChunk, EngineRequest, Leg
from kvrouter.transports.requests.port import ReaderTooSlow, StreamBroken, WorkerFull, WorkerUnreachable
from kvrouter.transports.requests.stream import REQUEST_MAX_BYTES, LegStream, WireError, error_of
from kvrouter.transports.requests.tcp.connection import Connection
from kvrouter.transports.requests.tcp.frames import (
    GREETED,
    GREETING_BYTES,
    TO_ROUTER,
    FrameKind,
    Secret,
    TcpAddress,
    credit_of,
    decode,
    encode_cancel,
    encode_credits,
    encode_open,
    hello,
    items_decoder,
    new_nonce,
    number_decoder,
    read_greeting,
    refused_decoder,
)


class CreditSink(Protocol):
    """The connection, as a stream sees it."""

    def give_credit(self, stream_id: int, tokens: int) -> None:
        """The reader made room for ``tokens`` more."""

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        """The reader wants no more, or no longer needs what an ended leg left behind."""


class TcpStream(LegStream):
    """One open leg. What waits for the reader is never longer than the credit that was given."""

    __slots__ = (
        "_connection",
        "_credit_tokens",
        "_id",
        "_leaves_kv",
        "_owed_tokens",
        "_refill_tokens",
        "accepted",
    )

    def __init__(
        self,
        connection: CreditSink,
        stream_id: int,
        *,
        credit_tokens: int,
        leaves_kv: bool,
        accepted: asyncio.Future[None],
    ) -> None:
        super().__init__(on_read=self._owe, on_cancel=self._withdraw)
        self.accepted = accepted
        self._connection = connection
        self._id = stream_id
        self._leaves_kv = leaves_kv
        self._credit_tokens = credit_tokens
        self._refill_tokens = max(1, credit_tokens // 2)
        self._owed_tokens = 0

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        """The worker sent bare tokens; raise as :meth:`push` does."""
        n_tokens = len(token_ids) or 1
        if n_tokens > self._credit_tokens:
            raise _overdrawn()
        self._credit_tokens -= n_tokens
        sink = self._sink
        if sink is None:
            self._add(EngineChunk(token_ids), n_tokens)
            return
        # As _owe and _hand do: this is done for every token of every answer.
        self._owed_tokens += n_tokens
        if self._owed_tokens >= self._refill_tokens:
            self._give_credit()
        try:
            if sink(token_ids):
                return
        except Exception as error:  # noqa: BLE001 - a reader's mistake is its own, not the connection's
            self._hand_failed(error)
        self._end_handing()

    def push(self, chunk: EngineChunk) -> None:
        """The worker sent more; raise ProtocolError when it sent more than it had credit for."""
        n_tokens = credit_of(chunk)
        if n_tokens > self._credit_tokens:
            raise _overdrawn()
        self._credit_tokens -= n_tokens
        super().push(chunk)

    def fail(self, error: KvrouterError) -> None:
        """The leg was refused, or failed; what came before is still read."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        super().fail(error)

    def give_up(self, limit_s: float) -> None:
        """The reader is too slow: the leg ends, and the reader hears why when it reads again."""
        reason = f"cancelled: its reader took nothing for {limit_s:g} s"
        self.fail(ReaderTooSlow(reason))
        self._connection.cancel_stream(self._id, reason)

    def _withdraw(self, reason: str) -> None:
        if self._leaves_kv or not self._complete:
            self._connection.cancel_stream(self._id, reason)

    def _owe(self, n_tokens: int) -> None:
        """The reader took tokens: give credit for more, half of the whole at a time."""
        self._owed_tokens += n_tokens
        if self._owed_tokens >= self._refill_tokens and not self.is_over:
            self._give_credit()

    def _give_credit(self) -> None:
        self._connection.give_credit(self._id, self._owed_tokens)
        self._credit_tokens += self._owed_tokens
        self._owed_tokens = 0


def _overdrawn() -> ProtocolError:
    return ProtocolError("the worker sent more tokens than it had credit for", param="token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """What a router's end keeps to; the constructor of the plane says what each means."""

    heartbeat_s: float
    dead_after_s: float
    slow_stream_limit_s: float
    idle_close_s: float
    stream_credit_tokens: int
    streams_max: int
    write_max_bytes: int


class RouterEnd(Connection):
    """A connection to one worker. It may be used once ``welcomed`` is done."""

    def __init__(
        self,
        address: TcpAddress,
        secret: Secret,
        limits: RouterLimits,
        *,
        is_wanted: Callable[[], bool],
        on_refused: Callable[[str], None],
    ) -> None:
        super().__init__(
            kinds=GREETED,
            heartbeat_s=limits.heartbeat_s,
            dead_after_s=limits.dead_after_s,
            write_max_bytes=limits.write_max_bytes,
        )
        self.welcomed: asyncio.Future[None] = self.loop.create_future()
        self._address = address
        self._secret = secret
        self._limits = limits
        self._is_wanted = is_wanted
        self._report_refused = on_refused
        self._nonce = new_nonce()
        self._worker_nonce = b""
        self._streams: dict[int, TcpStream] = {}
        self._next_id = 0
        self._credits_tokens: dict[int, int] = {}
        self._idle_beats = 0
        self._beaten_s = 0.0
        self.handlers |= {
            FrameKind.WELCOME: self._on_welcome,
            FrameKind.ACCEPTED: self._on_accepted,
            FrameKind.REFUSED: self._on_refused,
            FrameKind.CHUNKS: self._on_chunks,
            FrameKind.FAILED: self._on_failed,
        }

    # Hello

    def read_opening(self, data: bytearray) -> int | None:
        """Answer the greeting with a hello."""
        nonce = read_greeting(data)
        if nonce is None:
            return None
        self._worker_nonce = nonce
        who = self._address
        self.send_raw(hello(self._secret, nonce, self._nonce, who.worker_id, who.incarnation))
        return GREETING_BYTES

    def _on_welcome(self, proof: bytes) -> None:
        who = self._address
        expected = self._secret.worker_proof(self._worker_nonce, self._nonce, who.worker_id, who.incarnation)
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("the worker does not know the token", param="token")
        self.read_only(TO_ROUTER)
        if not self.welcomed.done():
            self.welcomed.set_result(None)

    def refuse(self, reason: str) -> None:
        """The worker did what the protocol does not allow."""
        if self.welcomed.done():  # else the caller that connects gets the error
            self._report_refused(f"{self._address}: {reason}")
        super().refuse(reason)

    # Legs

    def open(self, request: EngineRequest) -> TcpStream:
        """Send ``request``; ``accepted`` of the stream gives what the worker says.

        Raises WorkerUnreachable when it cannot be sent, InvalidRequest when it is too large to be.
        """
        if self.is_closed:
            raise WorkerUnreachable(f"{self._address}: the connection was lost")
        if len(self._streams) >= self._limits.streams_max:
            raise WorkerFull(f"{self._address}: {self._limits.streams_max} streams are open")
        stream_id = self._next_id
        body = encode_open(stream_id, self._limits.stream_credit_tokens, request)
        if len(body) > REQUEST_MAX_BYTES:
            raise InvalidRequest(
                f"token_ids: the request has {len(body)} bytes, over the {REQUEST_MAX_BYTES} allowed",
                param="token_ids",
            )
        waiting_bytes = self.waiting_bytes
        if waiting_bytes and waiting_bytes + len(body) > self._limits.write_max_bytes // 2:
            raise WorkerFull(f"{self._address}: {waiting_bytes} bytes wait to be read there")
        self._next_id += 1
        stream = self._streams[stream_id] = TcpStream(
            self,
            stream_id,
            credit_tokens=self._limits.stream_credit_tokens,
            leaves_kv=request.leg is Leg.PREFILL,
            accepted=self.loop.create_future(),
        )
        self.send(FrameKind.OPEN, body)
        return stream

    def give_credit(self, stream_id: int, tokens: int) -> None:
        """The reader of a stream made room for ``tokens`` more."""
        self._credits_tokens[stream_id] = self._credits_tokens.get(stream_id, 0) + tokens
        self.flush_soon()

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        """The reader of a stream left, or does not need what an ended leg left behind."""
        self._streams.pop(stream_id, None)
        self._credits_tokens.pop(stream_id, None)
        if not self.is_closed:
            self.send(FrameKind.CANCEL, encode_cancel(stream_id, reason))

    def gather(self) -> None:
        """Send the credit of all streams in one frame."""
        if self._credits_tokens:
            gathered, self._credits_tokens = self._credits_tokens, {}
            self.send(FrameKind.CREDIT, encode_credits(gathered))

    # What the worker says

    def _on_chunks(self, body: bytes) -> None:
        streams = self._streams
        for stream_id, token_ids, chunk in decode(items_decoder, body, "chunks"):
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
        stream = self._streams.get(decode(number_decoder, body, "accepted"))
        if stream is not None and not stream.accepted.done():
            stream.accepted.set_result(None)

    def _on_refused(self, body: bytes) -> None:
        stream_id, error = _error(body)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.fail(error)

    def _on_failed(self, body: bytes) -> None:
        stream_id, error = _error(body)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.fail(StreamBroken(error.message) if type(error) is WorkerUnreachable else error)

    # Life

    def beat(self) -> None:
        """Cancel streams that nobody reads; close a connection that nobody needs."""
        limits = self._limits
        self._beaten_s += limits.heartbeat_s  # a loop that stood still has not let its readers read meanwhile
        for stream in tuple(self._streams.values()):
            if stream.unread_for_s(self._beaten_s) >= limits.slow_stream_limit_s:
                stream.give_up(limits.slow_stream_limit_s)
        self._idle_beats = 0 if self._streams or self._is_wanted() else self._idle_beats + 1
        if self._idle_beats * limits.heartbeat_s > limits.idle_close_s:
            self.close("nothing was asked for a while")

    def ended(self, reason: str) -> None:
        """Legs that were not taken yet are unreachable, the others break."""
        why = f"{self._address}: {reason}"
        if not self.welcomed.done():
            self.welcomed.set_exception(WorkerUnreachable(why))
        streams, self._streams = self._streams, {}
        self._credits_tokens.clear()
        for stream in streams.values():
            if stream.accepted.done():
                stream.break_off(why)
            else:
                stream.fail(WorkerUnreachable(why))


def _error(body: bytes) -> tuple[int, KvrouterError]:
    refused = decode(refused_decoder, body, "refused")
    return refused.stream_id, error_of(WireError(refused.code, refused.message, refused.param))
