"""The reader's end of one leg over tcp: that of any leg, and the credit that its worker was given."""

import asyncio
from typing import Protocol

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.requests import EngineChunk
from kvrouter.planes.requests.port import ReaderTooSlow
from kvrouter.planes.requests.stream import LegStream
from kvrouter.planes.requests.tcp.frames import credit_of


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
