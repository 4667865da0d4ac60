"""The router's end of one leg, over any transport: a stream of chunks."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg, merge_chunks
from kvrouter.transports.background import LATE_S, DueTimes
from kvrouter.transports.requests.encoding import credit_of, is_bare, weight_of
from kvrouter.transports.requests.port import StreamBroken, TokenSink, WorkerUnreachable


class LegStream:
    """One open leg, filled by its transport and emptied by its reader.

    The transport calls :meth:`accept`, :meth:`push`, :meth:`push_tokens` and :meth:`fail`, and gives two
    functions: ``on_read`` is called with the number of tokens that the reader took, ``on_cancel`` asks the
    worker to stop. A chunk without tokens counts as one token.
    """

    __slots__ = (
        "__weakref__",
        "_acceptance",
        "_cancelled",
        "_chunks",
        "_complete",
        "_failure",
        "_fetches_kv",
        "_loop",
        "_on_cancel",
        "_on_read",
        "_reader",
        "_sink",
        "_unread_since_s",
        "_withheld_cancel",
        "address",
        "is_accepted",
        "is_over",
        "is_postponed",
        "on_settled",
        "waiting_tokens",
    )

    def __init__(
        self,
        address: str,
        request: EngineRequest,
        *,
        on_read: Callable[[int], None],
        on_cancel: Callable[[str], None],
    ) -> None:
        self.address = address
        self.is_accepted = False
        """Whether the worker accepted the leg."""
        self.is_over = False
        """True once no more input is expected: the last chunk came, or the leg failed or was cancelled."""
        self.is_postponed = False
        """Whether the end of its wait for acceptance was postponed, because the event loop was late."""
        self.on_settled: Callable[[LegStream], None] | None = None
        """Called once the worker's acceptance is no longer awaited, perhaps more than once."""
        self.waiting_tokens = 0
        self._loop = asyncio.get_running_loop()
        self._on_read = on_read
        self._on_cancel = on_cancel
        self._chunks: list[EngineChunk] = []
        self._unread_since_s: float | None = None
        self._reader: asyncio.Future[None] | None = None
        self._sink: TokenSink | None = None
        self._failure: KvrouterError | None = None
        self._acceptance: asyncio.Future[None] | None = None
        self._fetches_kv = bool(request.kv_transfer_params)
        self._withheld_cancel: str | None = None
        """Why a leg that fetches KV is to be cancelled once its worker has accepted it."""
        self._cancelled = False
        self._complete = False

    def unread_for_s(self, now_s: float) -> float:
        """Seconds since the caller first saw unread chunks, by the caller's clock; 0 when all are read."""
        if not self._chunks:
            return 0.0
        if self._unread_since_s is None:
            self._unread_since_s = now_s
        return now_s - self._unread_since_s

    def accept(self) -> None:
        """Record that the worker accepted the leg."""
        self.is_accepted = True
        self._cancel_withheld()
        self._settle()

    async def accepted(self) -> None:
        """Return once the worker accepted the leg, or the leg was cancelled; raise as a read does."""
        if not (self.is_accepted or self.is_over):
            self._acceptance = self._loop.create_future()
            await self._acceptance
        if not self.is_accepted:
            self._raise_failure()

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Add bare tokens from the worker; ignored after the end."""
        if self._sink is None:
            self.push(EngineChunk(token_ids))
        else:
            self._on_read(len(token_ids) or 1)
            self._hand(self._sink, token_ids)

    def push(self, chunk: EngineChunk) -> None:
        """Add a chunk from the worker; ignored after the end."""
        if self.is_over:
            return
        if self._sink is not None:
            if is_bare(chunk):
                self.push_tokens(chunk.token_ids)
                return
            self._sink = None
        self._add(chunk, weight_of(chunk))

    def fail(self, error: KvrouterError) -> None:
        """End the stream with ``error``, after the chunks before it; ignored after the end."""
        self._withheld_cancel = None
        self._settle()
        if not self.is_over:
            self.is_over = True
            self._failure = error
            self._sink = None
            self._wake()

    def break_off(self, why: str) -> None:
        """End the stream: the worker is lost. A leg that it had not accepted may be sent elsewhere."""
        self.fail(StreamBroken(why) if self.is_accepted else WorkerUnreachable(why))

    def withdraw(self, error: KvrouterError) -> None:
        """End the stream with ``error``, and ask the worker to stop; ignored after the end."""
        self._cancel_withheld()
        if not self.is_over:
            self.fail(error)
            self._on_cancel(error.message)

    def __aiter__(self) -> "LegStream":
        return self

    async def __anext__(self) -> EngineChunk:
        chunks = self._chunks
        while not chunks:
            self._raise_failure()
            if self.is_over:
                raise StopAsyncIteration
            await self._wait()
        chunk = chunks[0] if len(chunks) == 1 else merge_chunks(chunks)
        chunks.clear()
        self._unread_since_s = None
        read_tokens, self.waiting_tokens = self.waiting_tokens, 0
        self._on_read(read_tokens)
        return chunk

    async def hand_over(self, sink: TokenSink) -> None:
        """Pass ``sink`` bare tokens as they arrive, until it returns False or something else arrives."""
        if self._chunks or self.is_over:
            return
        self._sink = sink
        try:
            await self._wait()
        finally:
            self._sink = None

    def cancel(self, reason: str) -> None:
        """Ask the worker to stop and to free the leg's resources; idempotent, allowed at any time."""
        if self._cancelled or self._failure is not None:
            return
        self._cancelled = self.is_over = True
        self._sink = None
        if self._chunks or not self._complete:
            self._chunks[:] = [EngineChunk(finish=FinishReason.CANCELLED)]
            self._wake()
        if self._fetches_kv and not self.is_accepted:
            self._withheld_cancel = reason
        else:
            self._on_cancel(reason)
        self._settle()

    def _cancel_withheld(self) -> None:
        reason, self._withheld_cancel = self._withheld_cancel, None
        if reason is not None:
            self._on_cancel(reason)

    def _add(self, chunk: EngineChunk, n_tokens: int) -> None:
        self._chunks.append(chunk)
        self.waiting_tokens += n_tokens
        if chunk.finish is not None:
            self._complete = self.is_over = True
        reader = self._reader  # as _wake does
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _hand(self, sink: TokenSink, token_ids: Sequence[int]) -> None:
        """Call the reader; its exception is raised in the reader, not in the transport."""
        try:
            if sink(token_ids):
                return
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader gets it
            self._hand_failed(error)
        self._end_handing()

    def _hand_failed(self, error: Exception) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(error)

    def _end_handing(self) -> None:
        self._sink = None
        self._wake()

    async def _wait(self) -> None:
        if self._reader is not None:
            raise RuntimeError("a stream has one reader")
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _settle(self) -> None:
        if self._acceptance is not None and not self._acceptance.done():
            self._acceptance.set_result(None)
        if self.on_settled is not None and self._withheld_cancel is None:
            self.on_settled(self)

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            raise type(failure)(failure.message, param=failure.param, answer=failure.answer)


class UnacceptedLegs:
    """Withdraws the legs that their workers have not accepted after ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._due_times: DueTimes[LegStream] = DueTimes(self.check)

    def add(self, stream: LegStream, begun_s: float) -> None:
        """Add a leg whose opening began at ``begun_s`` on the monotonic clock."""
        stream.on_settled = self._due_times.drop
        self._due_times.put(stream, begun_s + self._limit_s)

    def unanswered(self, address: str) -> WorkerUnreachable:
        """Return the error for a leg that the worker at ``address`` did not accept in time."""
        return WorkerUnreachable(f"{address} did not answer in {self._limit_s} s")

    def check(self, stream: LegStream, now_s: float, late_s: float) -> float | None:
        """Withdraw a leg at the limit; where the check is late, return a later time, once."""
        if late_s > LATE_S and not stream.is_postponed:  # the worker's answer may wait to be read
            stream.is_postponed = True
            return now_s + late_s
        stream.withdraw(self.unanswered(stream.address))
        return None


class CreditSink(Protocol):
    """The part of a session that a stream uses."""

    @property
    def address(self) -> str:
        """The worker's address, for messages to people."""

    def give_credit(self, stream_id: int, tokens: int) -> None:
        """Give the worker credit for ``tokens`` more."""

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        """Cancel a stream, or free the KV that its ended leg left at the worker."""


class SessionStream(LegStream):
    """One open leg over a session. Unread tokens never exceed the credit that was given."""

    __slots__ = (
        "_credit_tokens",
        "_id",
        "_leaves_kv",
        "_owed_tokens",
        "_refill_tokens",
        "_session",
    )

    def __init__(
        self, session: CreditSink, stream_id: int, credit_tokens: int, request: EngineRequest
    ) -> None:
        super().__init__(session.address, request, on_read=self._owe, on_cancel=self._cancel_at_worker)
        self._session = session
        self._id = stream_id
        self._leaves_kv = request.leg is Leg.PREFILL
        self._credit_tokens = credit_tokens
        self._refill_tokens = max(1, credit_tokens // 2)
        self._owed_tokens = 0

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Add bare tokens from the worker; raises as :meth:`push` does."""
        n_tokens = len(token_ids) or 1
        if n_tokens > self._credit_tokens:
            raise _overdrawn()
        self._credit_tokens -= n_tokens
        sink = self._sink
        if sink is None:
            self._add(EngineChunk(token_ids), n_tokens)
            return
        # Inlined from _owe and _hand: this runs for every token of every answer.
        self._owed_tokens += n_tokens
        if self._owed_tokens >= self._refill_tokens:
            self._give_credit()
        try:
            if sink(token_ids):
                return
        except Exception as error:  # noqa: BLE001 - a reader's exception must not end the connection
            self._hand_failed(error)
        self._end_handing()

    def push(self, chunk: EngineChunk) -> None:
        """Add a chunk from the worker; raise ProtocolError above the credit."""
        n_tokens = credit_of(chunk)
        if n_tokens > self._credit_tokens:
            raise _overdrawn()
        self._credit_tokens -= n_tokens
        super().push(chunk)

    def _cancel_at_worker(self, reason: str) -> None:
        if self._leaves_kv or not self._complete:
            self._session.cancel_stream(self._id, reason)

    def _owe(self, n_tokens: int) -> None:
        """Count read tokens; give credit for more, half of the credit at a time."""
        self._owed_tokens += n_tokens
        if self._owed_tokens >= self._refill_tokens and not self.is_over:
            self._give_credit()

    def _give_credit(self) -> None:
        self._session.give_credit(self._id, self._owed_tokens)
        self._credit_tokens += self._owed_tokens
        self._owed_tokens = 0


def _overdrawn() -> ProtocolError:
    return ProtocolError("the worker sent more tokens than it had credit for", param="token_ids")
