"""The router's end of one leg, whatever wire it came over: what waits to be read, and how the leg ends."""

import asyncio
from collections.abc import Callable, Sequence

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import EngineChunk, FinishReason, merge_chunks
from kvrouter.planes.requests.port import StreamBroken, TokenSink
from kvrouter.planes.requests.wire import is_bare, weight_of


class LegStream:
    """One open leg, as its wire fills it and its reader empties it.

    Its wire calls :meth:`push`, :meth:`push_tokens` and :meth:`fail`, and gives two functions: ``on_read``
    hears how many tokens the reader took, ``on_cancel`` tells the worker to stop. A chunk without tokens
    counts as one token.
    """

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_chunks",
        "_complete",
        "_failure",
        "_loop",
        "_on_cancel",
        "_on_read",
        "_reader",
        "_sink",
        "_unread_since_s",
        "is_over",
        "waiting_tokens",
    )

    def __init__(self, *, on_read: Callable[[int], None], on_cancel: Callable[[str], None]) -> None:
        self.is_over = False
        """True once nothing more is expected of the wire: the last chunk came, it failed or was cancelled."""
        self.waiting_tokens = 0
        self._loop = asyncio.get_running_loop()
        self._on_read = on_read
        self._on_cancel = on_cancel
        self._chunks: list[EngineChunk] = []
        self._unread_since_s: float | None = None
        self._reader: asyncio.Future[None] | None = None
        self._sink: TokenSink | None = None
        self._failure: KvrouterError | None = None
        self._cancelled = False
        self._complete = False

    def unread_for_s(self, now_s: float) -> float:
        """How long chunks have waited without any being read, as far as whoever asks has seen: it asks now
        and then, by a clock of its own. 0 when none waits.
        """
        if not self._chunks:
            return 0.0
        if self._unread_since_s is None:
            self._unread_since_s = now_s
        return now_s - self._unread_since_s

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        """The worker sent bare tokens. Nothing counts after the end."""
        if self._sink is None:
            self.push(EngineChunk(token_ids))
        else:
            self._on_read(len(token_ids) or 1)
            self._hand(self._sink, token_ids)

    def push(self, chunk: EngineChunk) -> None:
        """The worker sent more. Nothing counts after the end."""
        if self.is_over:
            return
        if self._sink is not None:
            if is_bare(chunk):
                self.push_tokens(chunk.token_ids)
                return
            self._sink = None
        self._add(chunk, weight_of(chunk))

    def fail(self, error: KvrouterError) -> None:
        """The leg is lost: the reader gets what came before, then ``error``. Nothing counts after the end."""
        if not self.is_over:
            self.is_over = True
            self._failure = error
            self._sink = None
            self._wake()

    def break_off(self, why: str) -> None:
        """The worker is lost: the reader gets what came before, then StreamBroken."""
        self.fail(StreamBroken(why))

    def __aiter__(self) -> "LegStream":
        return self

    async def __anext__(self) -> EngineChunk:
        chunks = self._chunks
        while not chunks:
            if self._failure is not None:
                raise type(self._failure)(self._failure.message, param=self._failure.param)
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
        """Give ``sink`` bare tokens as they arrive, until it returns False or something else comes."""
        if self._chunks or self.is_over:
            return
        self._sink = sink
        try:
            await self._wait()
        finally:
            self._sink = None

    def cancel(self, reason: str) -> None:
        """Tell the worker to stop and free what it holds; idempotent, allowed at any time."""
        if self._cancelled or self._failure is not None:
            return
        self._cancelled = self.is_over = True
        self._sink = None
        if self._chunks or not self._complete:
            self._chunks[:] = [EngineChunk(finish=FinishReason.CANCELLED)]
            self._wake()
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
        """Call the reader. Its mistake is its own, not its wire's."""
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
