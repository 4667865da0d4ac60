"""Generation: the answer to one request, as an iterator that its client reads.

Chunks are pulled: the engine's stream advances only when the client reads, so a slow client holds back its
own stream and no other. :class:`~kvrouter.router.request_run.RequestRun` sends lost legs to other workers.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Self

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import InvalidRequest, KvrouterError, RetryBodiesFull
from kvrouter.core.requests import EngineChunk, FinishReason, GenerateRequest, Usage
from kvrouter.kernel.journey import Finished, LegRefused, State
from kvrouter.kernel.placement.attempt_request import prompt_of
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.request_driver import Attempt
from kvrouter.router.instrumentation import ServiceInstrumentation, Times, expected_tokens
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.request_run import RequestRun, SentAttempt
from kvrouter.router.stall_watch import StallTimes, Timeouts
from kvrouter.router.traffic import NO_ORIGIN, LegSpans, Origin, TrafficRecorder
from kvrouter.transports.requests.port import (
    RequestTransport,
    StreamBroken,
    TokenSink,
    WorkerUnreachable,
)

_DECODING, _ERROR, _CANCELLED = State.DECODING, FinishReason.ERROR, FinishReason.CANCELLED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

FINISHED = "finished"
ANSWERED = "answered"
"""Reasons to close after success: the engine's last chunk, or a stop string of the client."""


class TokenTimes:
    """Records when tokens arrive, over all attempts of a request. Its methods run for every token."""

    def __init__(self, run: RequestRun) -> None:
        self.gaps_s = array("d")
        """Seconds between two arrivals of tokens: 8 bytes each, for any length of answer."""
        self._note_tokens = run.driver.tokens
        self._watch = run.watch
        self._token_s = 0.0

    def first(self, token_ids: Sequence[int]) -> None:
        """Note an attempt's first tokens; the time since the last attempt's tokens is no gap."""
        now_s = self._token_s = self._watch.progress_s = time.monotonic()
        self._note_tokens(token_ids, now_s)

    def more(self, token_ids: Sequence[int]) -> None:
        """Note further tokens of the attempt."""
        now_s = self._watch.progress_s = time.monotonic()
        self.gaps_s.append(now_s - self._token_s)
        self._token_s = now_s
        self._note_tokens(token_ids, now_s)

    def noting(self, sink: TokenSink) -> TokenSink:
        """Return a sink that notes tokens as :meth:`more` does and passes them to ``sink``."""
        watch, note_gap_s, note_tokens = self._watch, self.gaps_s.append, self._note_tokens
        clock_s = time.monotonic

        def take(token_ids: Sequence[int]) -> bool:
            now_s = watch.progress_s = clock_s()
            note_gap_s(now_s - self._token_s)
            self._token_s = now_s
            note_tokens(token_ids, now_s)
            return sink(token_ids)

        return take


class Generation:
    """The answer to one request: an async iterator of chunks and a context manager.

    The read that meets an error raises it. A chunk of comments alone does not count as answer: a leg that is
    lost after it can still be sent to another worker. Leaving the context cancels running legs and closes
    every lease.
    """

    def __init__(
        self,
        request: GenerateRequest,
        model: ModelRouter,
        transport: RequestTransport,
        *,
        timeouts: Timeouts,
        stalls: StallTimes,
        redispatches_max: int,
        instrumentation: ServiceInstrumentation,
        retry_bodies: ByteBudget,
        on_end: Callable[["Generation"], None],
        received_s: float | None = None,
        origin: Origin = NO_ORIGIN,
        spans: LegSpans | None = None,
    ) -> None:
        self.request = request
        self.times = Times(begun_s=time.monotonic() if received_s is None else received_s)
        self._run = RequestRun(
            request,
            model,
            transport,
            timeouts=timeouts,
            stalls=stalls,
            redispatches_max=redispatches_max,
            instrumentation=instrumentation,
            times=self.times,
            spans=spans,
        )
        self._driver = self._run.driver
        self._journey = self._driver.journey
        self._watch = self._run.watch
        self._tokens = TokenTimes(self._run)
        self._model = model
        self._origin = origin
        self._instrumentation = instrumentation
        self._retry_bodies = retry_bodies
        self._on_end = on_end
        self._closed = False
        self._counted_tokens = 0
        self._usage: Usage | None = None
        self._brought_comment = False
        self._has_raised = False

    @property
    def placement(self) -> Placement | None:
        """The placement of the current or last attempt; None before the first decision."""
        return self._driver.placement

    @property
    def error(self) -> KvrouterError | None:
        """The error that ended the request; None otherwise."""
        return self._driver.error

    @property
    def generated(self) -> Sequence[int]:
        """The tokens of all attempts so far."""
        return self._journey.generated

    @property
    def attempts(self) -> int:
        """How many times the request was placed."""
        return self._journey.attempt + 1

    @property
    def trail(self) -> Sequence[Attempt]:
        """All attempts, where traffic is recorded or traced; empty otherwise."""
        return self._run.trail

    @property
    def resumes(self) -> int:
        """How many times another worker resumed the stream."""
        return self._journey.resumes

    @property
    def usage(self) -> Usage:
        """Token counts so far; tokens that several workers served count once. The engine counts a prompt that
        is unknown here.
        """
        if self._usage is not None:
            return self._usage
        counted = self._run.prompt_tokens if self.request.is_prompt_unknown else None
        return Usage(
            prompt_tokens=self.request.isl_tokens if counted is None else counted,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._run.cached_tokens,
        )

    @property
    def reported_cached_tokens(self) -> int | None:
        """The prompt tokens that the engine says it had cached; None where it does not say."""
        return self._run.cached_tokens if self._run.cache_known else None

    @property
    def expected_cached_tokens(self) -> int | None:
        """The prompt tokens that the router expected in the cache of the worker that prefilled; None before
        the first token, and where the prompt is unknown.
        """
        placement = self._run.first_placement
        return None if placement is None else expected_tokens(placement)

    @property
    def _completion_tokens(self) -> int:
        """How many tokens came so far; the engine's own count where it reports no token ids."""
        return len(self._journey.generated) or self._counted_tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close("client left")

    def __aiter__(self) -> Self:
        return self

    async def begin(self) -> None:
        """Place the request and send its legs, as the first read does otherwise. Idempotent."""
        if self._driver.attempt is None and not self._closed:
            await self._run.begin()

    async def __anext__(self) -> EngineChunk:
        run, driver, watch = self._run, self._driver, self._watch
        if driver.attempt is None:
            await self.begin()
        while True:
            attempt = driver.attempt
            if driver.error is not None or run.finish is not None or attempt is None:
                return self._end()
            if attempt.decode is None:
                raise RuntimeError("a generation without a decode stream was read")
            try:
                watch.resume(progressed=not self._brought_comment)
                try:
                    chunk = await attempt.decode.__anext__()
                finally:
                    watch.pause()
            except InvalidRequest as error:
                run.handle(LegRefused(error))
                continue
            except KvrouterError as error:
                if attempt.decode.is_accepted and not isinstance(error, StreamBroken | WorkerUnreachable):
                    raise
                await run.lose(attempt, error)
                continue
            except StopAsyncIteration:
                await run.lose(attempt, StreamBroken("the stream ended without a last chunk"))
                continue
            self._brought_comment = chunk.is_comment
            if chunk.kv_lost is not None:
                why = chunk.error or "it did not say why"
                await run.lose_kv(attempt, chunk.kv_lost, StreamBroken(why, answer=chunk.failure))
                continue
            if chunk.finish is _ERROR or chunk.finish is _CANCELLED:
                await run.await_prefill_worker_loss(attempt)
                await run.lose(attempt, StreamBroken(chunk.error or "the engine cancelled the request"))
                continue
            if chunk.finish is not None and not await run.await_prefill_end(attempt):
                continue
            self._take(attempt, chunk)
            return chunk

    async def hand_over(self, sink: TokenSink) -> None:
        """Pass tokens to ``sink`` in the event-loop turn of their arrival.

        Returns when ``sink`` returns False, when the next read yields an end, an error or another worker's
        tokens, or at once if the transport cannot. Raises what ``sink`` raises.
        """
        attempt = self._driver.attempt
        if (
            attempt is None
            or self.error is not None
            or self._journey.state is not State.STREAMING
            or attempt.decode is None
        ):
            return
        watch = self._watch
        watch.resume(progressed=True)
        try:
            await attempt.decode.hand_over(self._tokens.noting(sink))
        finally:
            watch.pause()

    def reader_waits(self) -> None:
        """Note that the client reads more slowly than its engine answers, so that the answer's duration says
        nothing about the worker's speed.
        """
        self._run.is_held_back = True

    def keep_call(self) -> None:
        """Count the body of the client's call in the budget while it may be needed for another leg."""
        if self.request.call is not None:
            self._retry_bodies.hold(self, len(self.request.call.body))

    def shed(self) -> None:
        """Drop the body of the client's call, the largest of a full budget. A request whose legs are sent
        loses its retries; any other request ends with an error.
        """
        self._instrumentation.retry_body_dropped(self.request)
        if not self._run.is_sent:
            self.abort(
                RetryBodiesFull("the bodies of running requests hold too many bytes; this one had most")
            )
        self._drop_call()

    def abort(self, error: KvrouterError) -> None:
        """End the request with ``error``, which the reader gets."""
        if not self._closed:
            self._driver.error = error
            self.close(error.code)

    def close(self, reason: str) -> None:
        """End the request: cancel its streams, close its leases, report it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._run.stop(reason)
        self._drop_call()
        self.times.ended_s = time.monotonic()
        if self.placement is not None and not self._journey.generated:  # only the engine counted the tokens
            self._model.answered(self.placement, tokens=self._counted_tokens)
        self._usage = self.usage
        self._instrumentation.request_ended(
            self.request,
            error=self.error,
            finished=reason in {ANSWERED, FINISHED},
            times=self.times,
            gaps_s=self._tokens.gaps_s,
            usage=self._usage,
            cache_known=self._run.cache_known,
            first_placement=self._run.first_placement,
        )
        if self._instrumentation.traffic is not None:
            self._record(self._instrumentation.traffic, finished=reason in {ANSWERED, FINISHED})
        self._on_end(self)

    def _record(self, traffic: TrafficRecorder, *, finished: bool) -> None:
        """Record the request's outcome. A request that was never placed has no hashed prompt yet."""
        request, trail = self.request, self._run.trail
        traffic.request_ended(
            request,
            self._origin,
            trail=trail,
            prompt=trail[0].placement.prompt
            if trail
            else prompt_of(request, request.token_ids, block_size=self._model.fleet.block_size),
            error=self.error,
            finished=finished,
            begun_s=self.times.begun_s,
            first_token_s=self.times.first_token_s,
            output_tokens=self._completion_tokens,
        )

    def _take(self, attempt: SentAttempt, chunk: EngineChunk) -> None:
        """Note the figures and tokens of a chunk of the last leg."""
        if chunk.cached_tokens is not None:
            attempt.cached_tokens = chunk.cached_tokens
            if attempt.placement.decision.prefill is None:
                self._run.note_cached(attempt, chunk.cached_tokens, chunk.prompt_tokens)
        if chunk.kv_bytes is not None:
            attempt.kv_bytes = chunk.kv_bytes
        if chunk.completion_tokens is not None:
            self._counted_tokens = chunk.completion_tokens
        if chunk.unread is not None:
            self._instrumentation.answer_unread(self.request, attempt.placement.decision.decode, chunk.unread)
        if chunk.raw and chunk.text_chars is None:
            self._journey.is_plain = False
        if chunk.token_ids or chunk.raw:
            if self._journey.state is _DECODING:
                self._run.first_tokens(more_come=chunk.finish is None)
                if not self._journey.may_resume:
                    self._drop_call()
                self._tokens.first(chunk.token_ids)
            else:
                self._tokens.more(chunk.token_ids)
        if chunk.finish is not None:
            attempt.decode = None
            self._run.handle(Finished(chunk.finish))
            self.close(FINISHED)

    def _drop_call(self) -> None:
        self._run.drop_call()
        self._retry_bodies.hold(self, 0)

    def _end(self) -> EngineChunk:
        """Raise the error once, or return a last chunk that no engine sent; then stop the iteration."""
        error, finish = self._driver.error, self._run.finish
        if error is not None and not self._has_raised:
            self._has_raised = True
            self.close(error.code)
            raise error
        if finish is not None and not self._closed:
            self.close(FINISHED)
            return EngineChunk(finish=finish)
        raise StopAsyncIteration
