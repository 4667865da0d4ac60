"""The answer to one leg, read from the engine's HTTP answer: server-sent events or one body.

A client that gets the engine's own bytes gets all of them unchecked: an answer is broken if the connection
broke, or if an error is in its place.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Protocol

import aiohttp
from msgspec.structs import replace

from kvrouter.core.engine_answer import BODY_MAX_BYTES, EngineAnswer, passed_headers
from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.http_client import connection_failure
from kvrouter.core.json import OFF_LOOP_BYTES
from kvrouter.core.requests import EngineChunk, FinishReason, KvTransferParams
from kvrouter.engines.openai.answer_events import (
    AnswerEvent,
    AnswerUsage,
    Failure,
    ReadEvent,
    UnreadEvent,
    read_event,
)
from kvrouter.engines.openai.failures import failure_inside
from kvrouter.engines.openai.server import (
    END_LIMIT_S,
    EVENTS_TYPE,
    AnswerHeaders,
)
from kvrouter.engines.openai.sse import DONE, EVENT_MAX_BYTES, AnswerReading, EventCutter, RawEvents
from kvrouter.transports.requests.port import EngineFailedLater, StreamBroken

RAW_CHUNK_BYTES = 2048
"""A chunk is sent once its events have this many bytes: on the request plane it takes one token of credit."""

PIECE_BYTES = 256 * 1024
"""Longer data, a whole answer or one event, travels in pieces: a message over NATS holds 1 MiB."""


ABORTED = "the engine aborted the answer"
"""No client asked for it: the engine was stopped, as in a rolling restart."""


async def _ended(task: asyncio.Task[aiohttp.ClientResponse] | asyncio.Task[bytes]) -> None:
    """Return once ``task`` has ended, however it did; it goes on where the caller is cancelled. asyncio.wait
    takes twice as long for that, before each first token.
    """
    if task.done():
        return
    ended = asyncio.get_running_loop().create_future()

    def end(_task: object) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    await ended


class SseStream:
    """A streamed answer as an :class:`EngineStream`: one chunk for a few events that came together.

    The call is sent from here: engines may send the head of a stream with its first token, after their whole
    queue, and the router waits less for the acceptance of a leg. The engine's refusal is raised by the read.
    Unread events wait at the engine, except the events of one read.
    """

    def __init__(
        self,
        opening: Coroutine[None, None, aiohttp.ClientResponse],
        reading: AnswerReading,
        read: ReadEvent = read_event,
    ) -> None:
        self._opening = asyncio.create_task(opening)
        self._is_open = False
        self._reading = reading
        self._events = _StreamedEvents(reading, read)
        self._cancelled: str | None = None
        self._is_over = False
        self._pieces = 0
        self._is_reading = False
        self._lost: str | None = None
        self._headers = AnswerHeaders(EVENTS_TYPE)

    def __aiter__(self) -> "SseStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._is_over:
            raise StopAsyncIteration
        chunk: EngineChunk | None = None
        broken: StreamBroken | InvalidRequest | None = None
        is_open = self._is_open or await self._open()
        if is_open and self._cancelled is None:
            try:
                chunk = await self._next()
            except (StreamBroken, InvalidRequest) as error:
                broken = error
            except ProtocolError as error:
                broken = StreamBroken(error.message)
            except (aiohttp.ClientError, OSError) as error:
                broken = StreamBroken(
                    f"the engine's answer broke off: {self._lost or connection_failure(error)}"
                )
        if not is_open or self._cancelled is not None:
            chunk = EngineChunk(finish=FinishReason.CANCELLED, error=self._cancelled)
        if chunk is None or chunk.finish is not None:
            self._is_over = True
            self._close()  # where it came to its end, its connection is another's already
        if chunk is None:
            raise broken or StreamBroken("the engine's answer is gone")
        return chunk

    async def _open(self) -> bool:
        """Wait until the answer begins; return False if it was cancelled. Raises the engine's refusal."""
        await _ended(self._opening)
        if self._opening.cancelled():
            self._is_over = self._lost is not None
            if self._lost is not None:
                raise StreamBroken(self._lost)
            return False
        self._is_over = self._opening.exception() is not None
        answer = self._opening.result()
        self._is_open = True
        if self._reading.passes_raw:
            self._headers.take(answer)
        return True

    @property
    def _answer(self) -> aiohttp.ClientResponse:
        return self._opening.result()

    def _close(self) -> None:
        """Take the call back where it is not answered yet, else close its connection."""
        if not self._opening.cancel() and not self._opening.cancelled() and not self._opening.exception():
            self._answer.close()

    def cancel(self, reason: str) -> None:
        """Close the connection: the engine aborts the call. Idempotent."""
        if self._cancelled is None and not self._is_over:
            self._cancelled = reason
            self._close()

    @property
    def awaited_piece(self) -> int | None:
        """See :class:`Awaiting`."""
        if not self._opening.done():
            return -1
        return self._pieces if self._is_reading and not self._is_over else None

    def break_off(self, why: str) -> None:
        """The engine sends no further bytes: the read raises StreamBroken."""
        self._lost = why
        self._close()

    async def _next(self) -> EngineChunk:
        events = self._events
        while not events.ready:
            if events.failure is not None:
                raise events.failure
            if events.error is not None:
                raise await self._failed(events.error)
            content = self._answer.content
            self._is_reading = True
            piece = await (self._read_behind_end() if events.is_done else content.readany())
            self._is_reading = False
            self._pieces += 1
            if piece:
                events.cut(piece)
                if events.is_done and not content.at_eof():
                    events.flush()
            else:
                events.end()
        chunk = events.ready.popleft()
        if self._headers.passed:
            chunk = replace(chunk, headers=self._headers.passed)
            self._headers.passed = ()
        return chunk

    async def _read_behind_end(self) -> bytes:
        """Return the bytes behind the last event; empty once the engine ends its answer, or does not within
        :data:`END_LIMIT_S`.
        """
        try:
            async with asyncio.timeout(END_LIMIT_S):
                return await self._answer.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return b""

    async def _failed(self, error: Failure) -> KvrouterError:
        """Return the error for the engine's error event, with all of its bytes and those behind it."""
        is_whole = False
        body = self._events.raw_of_error()
        with suppress(TimeoutError, aiohttp.ClientError, OSError):  # then it ends here
            async with asyncio.timeout(END_LIMIT_S):
                while len(body) <= BODY_MAX_BYTES and not is_whole:
                    piece = await self._answer.content.readany()
                    body += piece
                    is_whole = not piece
        answer = None
        if self._reading.passes_raw and len(body) <= BODY_MAX_BYTES:
            headers = passed_headers(tuple(self._answer.raw_headers), of_error=True)
            answer = EngineAnswer(self._answer.status, headers, body, is_events=True)
        # Once it began to answer, the call cannot be what was wrong.
        return failure_inside(replace(error, code=None) if self._events.has_begun else error, answer)


class WholeStream:
    """An answer in one body, as an :class:`EngineStream`.

    The call is sent from here: an engine answers it only when it is done, and the router waits less for its
    acceptance. The engine's refusal is raised by the read.
    """

    def __init__(
        self,
        send: Coroutine[None, None, bytes],
        reading: AnswerReading,
        read: ReadEvent = read_event,
        answer_headers: AnswerHeaders | None = None,
    ) -> None:
        self._answer_headers = answer_headers
        self._reading = reading
        self._read = read
        self._cancelled: str | None = None
        self._is_over = False
        self._lost: str | None = None
        self._answering = asyncio.create_task(send)
        self._pieces: deque[EngineChunk] = deque()

    def __aiter__(self) -> "WholeStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._is_over:
            raise StopAsyncIteration
        await _ended(self._answering)
        if self._lost is not None and self._answering.cancelled():
            self._is_over = True
            raise StreamBroken(self._lost)
        if self._cancelled is not None or self._answering.cancelled():
            self._is_over = True
            return EngineChunk(finish=FinishReason.CANCELLED, error=self._cancelled)
        if not self._pieces:
            self._is_over = True  # also where the answer is an error
            body = self._answering.result()
            is_long = len(body) > OFF_LOOP_BYTES
            chunk = await asyncio.to_thread(self._chunk, body) if is_long else self._chunk(body)
            self._pieces = _in_pieces(chunk)
            if self._answer_headers is not None and self._answer_headers.passed and self._reading.passes_raw:
                self._pieces[0] = replace(self._pieces[0], headers=self._answer_headers.passed)
        piece = self._pieces.popleft()
        self._is_over = not self._pieces
        return piece

    def cancel(self, reason: str) -> None:
        """Close the connection: the engine aborts the call. Idempotent."""
        if self._cancelled is None and not self._is_over:
            self._cancelled = reason
            if not self._answering.cancel() and not self._answering.cancelled():
                self._answering.exception()  # nobody reads it any more

    @property
    def awaited_piece(self) -> int | None:
        """See :class:`Awaiting`."""
        return None if self._answering.done() else 0

    def break_off(self, why: str) -> None:
        """The engine sends no further bytes: the read raises StreamBroken."""
        self._lost = why
        self._answering.cancel()

    def _chunk(self, body: bytes) -> EngineChunk:
        try:
            event = self._read(body)
        except ProtocolError as error:
            raise StreamBroken(error.message) from error
        if event.error is not None:
            raise failure_inside(event.error, self._answer_of(body))
        if event.finish is FinishReason.CANCELLED and self._reading.passes_raw:
            raise StreamBroken(ABORTED, answer=self._answer_of(body))
        finish = self._reading.finish_of(event.finish)
        if finish is None:
            why = event.why if isinstance(event, UnreadEvent) else "the engine's answer has no finish reason"
            raise StreamBroken(why)
        gathered = _Gathered(self._reading)
        gathered.take(event)
        gathered.add_raw(self._reading.cleaned(body))
        return gathered.chunk(finish, event.kv_transfer_params)

    def _answer_of(self, body: bytes) -> EngineAnswer | None:
        """Return what passes to the client of an error that has the status of a good answer, or of an answer
        that was aborted.
        """
        if not self._reading.passes_raw or len(body) > BODY_MAX_BYTES:
            return None
        return EngineAnswer(200, ((b"content-type", b"application/json"),), body)


def _in_pieces(chunk: EngineChunk) -> deque[EngineChunk]:
    """Return a chunk with its bytes in as many chunks as they need, all else in the last one."""
    raw = chunk.raw
    if len(raw) <= PIECE_BYTES:
        return deque([chunk])
    *firsts, last = (raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES))
    return deque([*(EngineChunk(raw=first) for first in firsts), replace(chunk, raw=last)])


class _Gathered:
    """The combined events of one read."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._raw: list[bytes] = []
        self.raw_bytes = 0
        self._token_ids: list[int] = []
        self._text_chars: int | None = 0
        self._cached_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._unread: str | None = None
        self.is_urgent = False
        """Whether it has bytes that do not wait for anything."""
        self.is_empty = True

    @property
    def is_worth_sending(self) -> bool:
        """Whether it need not wait for more. If tokens are reported, the part before the first of them (the
        role) waits for it: the client has no bytes until then, and another worker may begin again. Tokens
        wait for the bytes that contain them.
        """
        if self.is_empty or (self._reading.passes_raw and not self._raw):
            return False
        waits_for_tokens = self._reading.added_token_ids and self._text_chars is not None
        return self.is_urgent or bool(self._token_ids) or not waits_for_tokens

    @property
    def raw(self) -> bytes:
        """The engine's own bytes so far."""
        return b"".join(self._raw)

    def take(self, event: AnswerEvent) -> None:
        """Another event came."""
        self.is_empty = False
        if isinstance(event, UnreadEvent):
            self._unread = event.why
        self._token_ids.extend(event.token_ids)
        chars = event.text_chars
        if chars and self._reading.added_token_ids and not event.tells_tokens:
            chars = None  # an engine that has never heard of the field: nobody could go on from such text
        self._text_chars = None if chars is None or self._text_chars is None else self._text_chars + chars
        if event.usage is not None:
            self._count(event.usage)

    def _count(self, usage: AnswerUsage) -> None:
        if usage.cached_tokens is not None:
            self._cached_tokens = usage.cached_tokens
        if usage.prompt_tokens is not None:
            self._prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self._completion_tokens = usage.completion_tokens

    def add_raw(self, raw: bytes) -> None:
        """So much more of the engine's own bytes goes to the client."""
        if self._reading.passes_raw and raw:
            self._raw.append(raw)
            self.raw_bytes += len(raw)

    def add_urgent(self, raw: bytes) -> None:
        """Add bytes that do not wait for anything."""
        if raw:
            self.is_empty = False
            self.is_urgent = True
            self.add_raw(raw)

    def chunk(self, finish: FinishReason | None, params: KvTransferParams | None) -> EngineChunk:
        """Return all of it as one chunk."""
        reading = self._reading
        tells_text = reading.passes_raw and reading.added_token_ids
        return EngineChunk(
            token_ids=tuple(self._token_ids),
            finish=finish,
            cached_tokens=self._cached_tokens,
            kv_transfer_params=params,
            raw=self.raw,
            text_chars=self._text_chars if tells_text else None,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            unread=self._unread,
        )


class _StreamedEvents:
    """The events of a streamed answer, and the chunks that they make, which wait in ``ready``."""

    def __init__(self, reading: AnswerReading, read: ReadEvent) -> None:
        self.ready: deque[EngineChunk] = deque()
        self.has_begun = False
        self.is_done = False
        """Whether the engine wrote its end: later bytes are not read, and cannot break the answer."""
        self.failure: KvrouterError | None = None
        """Raised once what came before it is read."""
        self.error: Failure | None = None
        self._error_raw = b""
        """The event of the engine's failure, and the bytes behind it."""
        self._reading = reading
        self._read = read
        self._cutter = EventCutter()
        self._finish: FinishReason | None = None
        self._completion_tokens: int | None = None
        self._has_content = not reading.has_choices
        """Whether any text, token, tool call or finish reason came. The events of a chat or completion before
        it, such as the role, wait for it: of an answer that then fails the client has no bytes, and another
        worker may begin again.
        """
        self._params: KvTransferParams | None = None
        self._gathered = _Gathered(reading)
        self._comments: list[bytes] = []
        self._raw = RawEvents(reading)

    def cut(self, piece: bytes) -> None:
        """Make chunks of the events that ``piece`` completes; what came before a failure is read first."""
        try:
            for raw, data in self._cutter.push(piece):
                self._take(raw, data)
                is_full = self._gathered.raw_bytes >= (RAW_CHUNK_BYTES if self._has_content else PIECE_BYTES)
                if is_full and not self._raw.is_waiting:
                    self.flush()
        except (StreamBroken, InvalidRequest, ProtocolError) as error:
            self.failure = error
        self._send_comments()
        gathered = self._gathered
        is_awaited = not self.is_done and (self._has_content or gathered.is_urgent)
        if is_awaited and gathered.is_worth_sending and not self._raw.is_waiting:
            self.flush()

    def flush(self) -> None:
        """Make a chunk of the gathered events, if there are any."""
        if not self._gathered.is_empty:
            self.ready.extend(_in_pieces(self._gathered.chunk(None, None)))
            self._gathered = _Gathered(self._reading)

    def end(self) -> None:
        """The engine ended its answer, with or without its last event. Raises StreamBroken."""
        raw, data = self._cutter.end()
        if raw.strip() and not self._reading.passes_raw:
            raise StreamBroken("the engine closed the connection in the middle of an event")
        if raw:
            self._take(raw, data)
            self._send_comments()
        if self.error is None:
            finish = self._reading.finish_of(self._finish)
            if finish is None:
                raise StreamBroken("the engine's answer ended without a finish reason")
            self._gathered.add_raw(self._raw.end())
            self.ready.extend(_in_pieces(self._gathered.chunk(finish, self._params)))

    def raw_of_error(self) -> bytes:
        """Return the error event's bytes, those before it that were not sent, and those behind it."""
        return self._gathered.raw + self._raw.end() + self._error_raw + self._cutter.end()[0]

    def _send_comments(self) -> None:
        """Send comments that came alone: they are no part of an answer and wait for nothing."""
        if self._comments:
            if self._reading.passes_raw:
                comments = b"".join(self._comments)
                pieces = range(0, len(comments), PIECE_BYTES)
                self.ready.extend(EngineChunk(comments=comments[at : at + PIECE_BYTES]) for at in pieces)
            self._comments.clear()

    def _take(self, raw: bytes, data: bytes | None) -> None:
        if self.error is not None:
            self._error_raw += raw
        elif self.is_done:
            self._gathered.add_urgent(raw)
        elif data == DONE:
            if not self._has_content and self._completion_tokens == 0:  # so vLLM 0.31 reports a failure
                raise EngineFailedLater("the engine's answer ended without tokens and finish reason")
            self.is_done = True
            self._send_comments()
            self._gathered.add_urgent(self._raw.end() + raw)
        elif data is None:
            self._take_event(
                UnreadEvent(why=f"an event is over the {EVENT_MAX_BYTES} bytes that are read"), raw
            )
        elif data:
            self._take_event(self._read(data), raw)
        elif self._raw.is_waiting:
            self._gathered.add_urgent(self._raw.hold(raw))
        elif self._gathered.is_empty:
            self._comments.append(raw)
        else:
            self._gathered.add_urgent(raw)

    def _take_event(self, event: AnswerEvent, raw: bytes) -> None:
        if event.error is not None:
            self.error, self._error_raw = event.error, raw
            return
        if isinstance(event, UnreadEvent) and not self._reading.passes_raw:
            raise ProtocolError(event.why, param="data")
        self._send_comments()
        # Tokens are asked for where another engine can go on from them.
        can_go_on = self._reading.added_token_ids or not self.has_begun
        is_lost = can_go_on or not self._reading.shows_aborts
        if event.finish is FinishReason.CANCELLED and self._reading.passes_raw and is_lost:
            raise StreamBroken(ABORTED)
        self.has_begun = True
        self._finish = event.finish or self._finish
        self._params = event.kv_transfer_params or self._params
        if event.usage is not None:
            self._completion_tokens = event.usage.completion_tokens
        if not self._has_content:
            self._has_content = bool(event.finish or event.token_ids or event.text_chars != 0)
        self._gathered.take(event)
        self._gathered.add_raw(self._raw.take(event, raw))


class Awaiting(Protocol):
    """A stream that may wait for its engine in vain."""

    @property
    def awaited_piece(self) -> int | None:
        """The number of the piece of the answer that is awaited; None while the engine is not waited for."""

    def break_off(self, why: str) -> None:
        """The engine sends no further bytes: the read raises StreamBroken."""
