"""Tokenizes prompts through engines: sends ``POST /tokenize`` over the request transport.

Routing never depends on it: after a late, oversized or invalid answer the request is routed without one.
"""

import asyncio
import secrets
import time
from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import msgspec

from kvrouter.core.errors import DeadlineExceeded, InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import DpRank, Epoch, ModelName, RequestId, WorkerId
from kvrouter.core.json import OFF_LOOP_BYTES, Unreadable, parsed
from kvrouter.core.requests import (
    CallRoute,
    ClientCall,
    EngineRequest,
    FinishReason,
    Leg,
    Sampling,
    TokenBuffer,
)
from kvrouter.core.workers import WorkerCard
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.model_router import ModelRouter
from kvrouter.transports.requests.port import RequestTransport, StreamBroken

ASKED_BYTES_MAX = 512 * 1024
"""The longest prompt sent to an engine, in bytes of JSON."""

ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""The longest answer read; a longer one fails."""

ASKING_MAX = 32
"""The most prompts of one model that engines tokenize at a time; further ones are not sent."""

LATE_BYTES_MAX = 64 * 1024
"""Late answers to longer prompts do not count as failures of the engine."""

FAILURES_MAX = 3
"""After this many consecutive failures an engine is not asked for :data:`PAUSE_S`."""

PAUSE_S = 30.0

ABSENT_S = 600.0
"""How long an engine without the route is not asked, unless it restarts."""

_ABSENT = (404, 405, 501)
"""HTTP statuses of an engine without the route, or whose model cannot tokenize."""


class TokenizeOutcome(StrEnum):
    """The outcome of one tokenization."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The engine refused the call as invalid."""
    ABSENT = "absent"
    LATE = "late"
    FAILED = "failed"
    NOT_ASKED = "not_asked"
    """The prompt is too long, the limit is reached, or no engine may be asked now."""


class _Answer(msgspec.Struct, frozen=True):
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]], msgspec.Meta(min_length=1)]


_answer = msgspec.json.Decoder(_Answer)


class _Engine:
    """One engine's failures, and until when it is not asked."""

    __slots__ = ("failures", "incarnation", "logged_reason", "paused_until_s", "why")

    def __init__(self, incarnation: Epoch) -> None:
        self.incarnation = incarnation
        self.failures = 0
        self.paused_until_s = 0.0
        self.why = ""
        """Why it is not asked."""
        self.logged_reason = ""
        """The last logged reason."""


class EngineTokenizer:
    """Tokenizes prompts through the engines of any model, one engine a prompt, in turn. An engine is paused
    after failures, and longer where it has no such route; each reason is logged once.
    """

    def __init__(self, transport: RequestTransport, instrumentation: ServiceInstrumentation) -> None:
        self._transport = transport
        self._instrumentation = instrumentation
        self._engines: dict[WorkerId, _Engine] = {}
        self._asking: dict[ModelName, int] = {}
        self._turn = 0

    def why_not(self, model: ModelRouter) -> str | None:
        """Why no engine of a model can be asked; None where one can."""
        why = "none of its engines is here"
        for card in _askable(model):
            engine = self._engine(card)
            if engine.paused_until_s <= time.monotonic():
                return None
            why = f"POST {CallRoute.TOKENIZE} of its engines: {engine.why}"
        return why

    async def token_ids(self, model: ModelRouter, body: bytes, *, limit_s: float) -> TokenBuffer | None:
        """Return the tokens that an engine of ``model`` makes of ``body``, the JSON of its ``/tokenize``;
        None without a valid answer within ``limit_s`` seconds.
        """
        name = model.fleet.model
        card = self._next(model)
        asking = self._asking.get(name, 0)
        if card is None or asking >= ASKING_MAX or len(body) > ASKED_BYTES_MAX:
            self._instrumentation.engine_tokenized(name, TokenizeOutcome.NOT_ASKED.value)
            return None
        self._asking[name] = asking + 1
        try:
            async with asyncio.timeout(limit_s):
                found = await self._asked(card, body, limit_s)
            return self._note(card, TokenizeOutcome.ANSWERED, found)
        except (TimeoutError, DeadlineExceeded):
            is_short = len(body) <= LATE_BYTES_MAX
            self._note(card, TokenizeOutcome.LATE, why=f"no answer within {limit_s:g} s", counts=is_short)
        except KvrouterError as error:
            self._note(card, _outcome_of(error), why=error.message)
        finally:
            self._asking[name] -= 1
        return None

    async def _asked(self, card: WorkerCard, body: bytes, limit_s: float) -> TokenBuffer:
        """Send the call and read its answer. Raises KvrouterError."""
        request = EngineRequest(
            request_id=RequestId(f"tokenize-{secrets.token_hex(8)}"),
            attempt=0,
            leg=Leg.DECODE,
            model=card.model,
            token_ids=array("I"),
            sampling=Sampling(max_tokens=1),
            dp_rank=DpRank(card.dp_start),
            time_left_s=limit_s,
            call=ClientCall(CallRoute.TOKENIZE, body, stream=False, resumable=False),
        )
        stream = await self._transport.open(card.address, request)
        pieces: list[bytes] = []
        size_bytes = 0
        try:
            async for chunk in stream:
                if chunk.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
                    raise StreamBroken(chunk.error or "the answer broke off")
                pieces.append(chunk.raw)
                size_bytes += len(chunk.raw)
                if size_bytes > ANSWER_BYTES_MAX:
                    raise StreamBroken(f"its answer is over {ANSWER_BYTES_MAX} bytes")
                if chunk.finish is not None:
                    break
        finally:
            stream.cancel("its answer is not read any more")
        answer = b"".join(pieces)
        try:
            is_long = size_bytes > OFF_LOOP_BYTES
            return await asyncio.to_thread(_tokens, answer) if is_long else _tokens(answer)
        except Unreadable as error:
            raise StreamBroken(f"its answer cannot be read: {error}") from error

    def _next(self, model: ModelRouter) -> WorkerCard | None:
        now_s = time.monotonic()
        cards = [card for card in _askable(model) if self._engine(card).paused_until_s <= now_s]
        if not cards:
            return None
        self._turn += 1
        return cards[self._turn % len(cards)]

    def _engine(self, card: WorkerCard) -> _Engine:
        engine = self._engines.get(card.worker_id)
        if engine is None or engine.incarnation != card.incarnation:
            engine = self._engines[card.worker_id] = _Engine(card.incarnation)
        return engine

    def _note(
        self,
        card: WorkerCard,
        outcome: TokenizeOutcome,
        found: TokenBuffer | None = None,
        *,
        why: str = "",
        counts: bool = True,
    ) -> TokenBuffer | None:
        self._instrumentation.engine_tokenized(card.model, outcome.value)
        engine = self._engine(card)
        if outcome in (TokenizeOutcome.ANSWERED, TokenizeOutcome.REFUSED):
            engine.failures = 0
            if outcome is TokenizeOutcome.ANSWERED:
                engine.logged_reason = ""
            return found
        engine.failures += counts
        is_absent = outcome is TokenizeOutcome.ABSENT
        if not is_absent and engine.failures < FAILURES_MAX:
            return None
        engine.why = why
        engine.paused_until_s = time.monotonic() + (ABSENT_S if is_absent else PAUSE_S)
        if engine.logged_reason != why:
            engine.logged_reason = why
            self._instrumentation.engine_tokenize_failed(card, why)
        return None

    def gone(self, card: WorkerCard) -> None:
        """Forget a worker that has left."""
        self._engines.pop(card.worker_id, None)


def _askable(model: ModelRouter) -> Iterator[WorkerCard]:
    """The workers whose engines take calls and are alive, and that take new requests."""
    fleet = model.fleet
    return (
        card
        for card in fleet
        if card.takes_calls and card.takes_new_requests and fleet.is_alive(card.worker_id)
    )


def _outcome_of(error: KvrouterError) -> TokenizeOutcome:
    is_unknown_to_worker = isinstance(error, ProtocolError)  # its version does not have the route
    if is_unknown_to_worker or (error.answer is not None and error.answer.status in _ABSENT):
        return TokenizeOutcome.ABSENT
    return TokenizeOutcome.REFUSED if isinstance(error, InvalidRequest) else TokenizeOutcome.FAILED


def _tokens(answer: bytes) -> TokenBuffer:
    return array("I", parsed(_answer, answer).tokens)
