"""The reader's end of one leg."""

import asyncio
from typing import Protocol

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.requests import EngineChunk, FinishReason, merge_chunks
from kvrouter.planes.requests.port import ReaderTooSlow, StreamBroken, TokenSink


class CreditSink(Protocol):
    """The connection, as a stream sees it."""

    def give_credit(self, stream_id: int, tokens: int) -> None:
        """The reader made room for ``tokens`` more."""

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        """The reader wants no more, or no longer needs what an ended leg left behind."""


class TcpStream:
    """One open leg. What waits for the reader is one chunk, never longer than the credit that was given."""

    __slots__ = (
        "_connection",
        "_credit_tokens",
        "_failure",
        "_id",
        "_is_over",
        "_is_read",
        "_leaves_kv",
        "_loop",
        "_owed_tokens",
        "_reader",
        "_refill_tokens",
        "_sink",
        "_unread_beats",
        "_waiting",
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
        self.accepted = accepted
        self._loop = accepted.get_loop()
        self._connection = connection
        self._id = stream_id
        self._leaves_kv = leaves_kv
        self._credit_tokens = credit_tokens
        self._refill_tokens = max(1, credit_tokens // 2)
        self._owed_tokens = 0
        self._waiting: EngineChunk | None = None
        self._failure: KvrouterError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._sink: TokenSink | None = None
        self._is_over = False
        self._is_read = False
        self._unread_beats = 0

    def __aiter__(self) -> "TcpStream":
        return self

    async def __anext__(self) -> EngineChunk:
        while (chunk := self._waiting) is None:
            if self._failure is not None:
                raise self._failure
            if self._is_read:
                raise StopAsyncIteration
            await self._wait()
        self._waiting = None
        self._unread_beats = 0
        if chunk.finish is not None:
            self._is_read = True
            return chunk
        self._owe(len(chunk.token_ids))
        return chunk

    async def hand_over(self, sink: TokenSink) -> None:
        """Give ``sink`` bare tokens as they arrive, until it returns False or something else comes."""
        if self._waiting is not None or self._is_over:
            return
        self._sink = sink
        try:
            await self._wait()
        finally:
            self._sink = None

    def cancel(self, reason: str) -> None:
        """Tell the worker to stop and free what it holds; idempotent, allowed at any time."""
        if not self._is_over:
            self._is_over = True
            self._waiting = EngineChunk(finish=FinishReason.CANCELLED)
            self._wake()
        elif not self._leaves_kv:
            return
        self._leaves_kv = False
        self._connection.cancel_stream(self._id, reason)

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        """The worker sent bare tokens; raise as :meth:`push` does."""
        sink = self._sink
        if sink is None:
            self.push(EngineChunk(token_ids))
            return
        # As _spend and _owe do: this is done for every token of every answer.
        n_tokens = len(token_ids)
        if n_tokens > self._credit_tokens:
            raise _overdrawn()
        self._credit_tokens -= n_tokens
        self._owed_tokens += n_tokens
        if self._owed_tokens >= self._refill_tokens:
            self._give_credit()
        try:
            goes_on = sink(token_ids)
        except Exception as error:  # noqa: BLE001 - a reader's mistake is its own, not the connection's
            self._sink = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)
            return
        if not goes_on:
            self._sink = None
            self._wake()

    def push(self, chunk: EngineChunk) -> None:
        """The worker sent more; raise ProtocolError when it sent more than it had credit for."""
        self._spend(len(chunk.token_ids))
        self._sink = None
        self._waiting = chunk if self._waiting is None else merge_chunks((self._waiting, chunk))
        if chunk.finish is not None:
            self._is_over = True
        self._wake()

    def fail(self, error: KvrouterError) -> None:
        """The leg failed; what came before is still read."""
        if not self._is_over:
            self._is_over = True
            self._failure = error
            self._leaves_kv = False
            if self.accepted.done():
                self._wake()
            else:
                self.accepted.set_exception(error)

    def break_off(self, why: str) -> None:
        """The connection is lost. Whoever reads on hears of it, unless the last chunk was read or waits."""
        self._leaves_kv = False
        self.fail(StreamBroken(why))

    def beat(self, *, heartbeat_s: float, slow_stream_limit_s: float) -> bool:
        """A heartbeat has passed; return whether chunks have waited unread for too long."""
        if self._waiting is None:
            return False
        self._unread_beats += 1
        return (self._unread_beats - 1) * heartbeat_s >= slow_stream_limit_s

    def give_up(self, limit_s: float) -> None:
        """The reader is too slow: the leg ends, and the reader hears why when it reads again."""
        reason = f"cancelled: its reader took nothing for {limit_s:g} s"
        self._waiting = None
        self._is_over = True
        self._leaves_kv = False
        self._failure = ReaderTooSlow(reason)
        self._connection.cancel_stream(self._id, reason)

    def _spend(self, n_tokens: int) -> None:
        self._credit_tokens -= n_tokens
        if self._credit_tokens < 0:
            raise _overdrawn()

    def _owe(self, n_tokens: int) -> None:
        """The reader took tokens: give credit for more, half of the whole at a time."""
        self._owed_tokens += n_tokens
        if self._owed_tokens >= self._refill_tokens and not self._is_over:
            self._give_credit()

    def _give_credit(self) -> None:
        self._connection.give_credit(self._id, self._owed_tokens)
        self._credit_tokens += self._owed_tokens
        self._owed_tokens = 0

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


def _overdrawn() -> ProtocolError:
    return ProtocolError("the worker sent more tokens than it had credit for", param="token_ids")
