"""Request run: places a request, sends its legs, and sends lost legs to other workers, as its journey
commands.

It reads only the prefill leg's answer; in a bootstrap handoff a parallel task does so.
:class:`~kvrouter.router.generation.Generation` reads the last leg.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from kvrouter.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvrouterError,
    RoutingRefused,
)
from kvrouter.core.requests import (
    EngineRequest,
    FinishReason,
    GenerateRequest,
    KvLoss,
    KvTransferParams,
)
from kvrouter.kernel.journey import (
    Abandon,
    ClientLeft,
    Command,
    End,
    Fail,
    Finished,
    LegRefused,
    NotPlaced,
    Place,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.kernel.placement.legs import keeping_leg, last_leg, prefill_leg
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.request_driver import Attempt, RequestDriver
from kvrouter.router.instrumentation import ServiceInstrumentation, Times, expected_tokens
from kvrouter.router.leg_outcomes import lost_leg, open_decode, prefill_outcome, read_prefill
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.stall_watch import Phase, StallTimes, StallWatch, Timeouts, TooLong
from kvrouter.router.traffic import LegSpans
from kvrouter.transports.requests.port import EngineStream, RequestTransport, SentLeg

_DONE, _SYNCHRONOUS = State.DONE, Shape.SYNCHRONOUS
_FIRST_TOKEN, _STREAMING = Phase.FIRST_TOKEN, Phase.STREAMING
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

PREFILL_END_WAIT_S = 0.25
"""How long the end of an answer waits for the end of its prefill leg, which uses another connection."""

KEEP_LIMIT_S = 1.0
"""How long a decode worker may take to keep the KV that the prefill worker fetches; else that computes."""

PREFILL_LOSS_CHECKS = 25
PREFILL_LOSS_CHECK_S = 0.01
"""For 0.25 s a router waits for the loss of a prefill worker that its decode worker may already know of."""


@dataclass(slots=True)
class SentAttempt(Attempt):
    """An attempt with the streams of its legs; abandoning the attempt cancels them."""

    kept: EngineStream | None = None
    """The leg that made the decode worker keep KV for the prefill worker, until that has it."""
    prefill: EngineStream | None = None
    prefill_task: asyncio.Task[None] | None = None
    decode: SentLeg | None = None


class RequestRun:
    """Sends one request's legs, as ``driver`` commands; ``driver.error`` or ``finish`` is set at its end."""

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
        times: Times,
        spans: LegSpans | None = None,
    ) -> None:
        self.driver: RequestDriver[SentAttempt] = RequestDriver(
            request.sampling,
            model.placer,
            redispatches_max=redispatches_max,
            is_plain=request.call is None or request.call.resumable,
        )
        self.watch = StallWatch(timeouts, stalls, self._too_long)
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.cache_known = False
        """Whether an engine reported how many prompt tokens it had cached."""
        self.prompt_tokens: int | None = None
        """The prompt's tokens by that engine's count; None where it reported none."""
        self.is_held_back = False
        """Whether the client ever read more slowly than the engine answered."""
        self.trail: list[SentAttempt] = []
        """All attempts, where traffic is recorded or traced; empty otherwise."""
        self._spans = spans
        self._first_attempt: SentAttempt | None = None
        """The attempt that brought the first token; None before it."""
        self._uncounted: SentAttempt | None = None
        """An attempt whose first tokens came and are not counted yet."""
        self._sent: tuple[SentLeg, float] | None = None
        """A leg that was sent before its placement was booked, and when; taken by :meth:`_send_decode`."""
        self._request = request
        self._model = model
        self._transport = transport
        self._timeouts = timeouts
        self._instrumentation = instrumentation
        self._times = times

    async def begin(self) -> None:
        """Place the request and send its legs; does nothing for a request that has ended."""
        journey = self.driver.journey
        if journey.state is not _DONE:
            await self._perform(journey.begin())

    def handle(self, event: Finished | LegRefused) -> None:
        """Pass the end of the last leg to the journey; no further leg is sent."""
        self._count_first_tokens()
        self._perform_now(self.driver.journey.handle(event))

    def stop(self, reason: str) -> None:
        """End the request: cancel its legs and close its leases. Idempotent."""
        try:
            self._count_first_tokens()
        finally:
            self.driver.journey.handle(ClientLeft(reason))
            self._abandon(reason)
            self.driver.end(time.monotonic())
            self.watch.stop()

    @property
    def first_placement(self) -> Placement | None:
        """The placement of the attempt that brought the first token; None before it."""
        return None if self._first_attempt is None else self._first_attempt.placement

    @property
    def is_sent(self) -> bool:
        """Whether all legs of the current attempt have been sent."""
        attempt = self.driver.attempt
        if attempt is None or attempt.decode is None:
            return False
        task = attempt.prefill_task
        return task is None or task.done() or attempt.prefill is not None

    def drop_call(self) -> None:
        """Drop the body of the client's call: no further leg can be sent. Idempotent."""
        if self._request.call is not None:
            self._request.call.body = b""
            self.driver.journey.can_be_sent = False

    async def lose(self, attempt: SentAttempt, error: KvrouterError) -> None:
        """Handle the loss of the last leg."""
        self._count_first_tokens()
        lost = lost_leg(attempt.placement.decision.decode, error, self._request.call)
        await self._perform(self.driver.last_leg_lost(attempt, lost, time.monotonic()))

    async def lose_kv(self, attempt: SentAttempt, loss: KvLoss, error: KvrouterError) -> None:
        """Handle KV that did not reach the decode worker."""
        self._count_first_tokens()
        event = self.driver.kv_loss(attempt, loss, error.message, error.answer)
        if event is None:
            await self.lose(attempt, error)
            return
        self._instrumentation.kv_lost(self._request, event, loss)
        lost = lost_leg(attempt.placement.decision.decode, error, self._request.call)
        await self._perform(self.driver.kv_lost(attempt, event, loss, lost, time.monotonic()))

    async def await_prefill_end(self, attempt: SentAttempt) -> bool:
        """Wait briefly for the end of the prefill leg, which was sent before decode began, on another
        connection.

        Returns False when the request ended meanwhile.
        """
        task = attempt.prefill_task
        if task is not None and not task.done():
            await asyncio.wait((task,), timeout=PREFILL_END_WAIT_S)
            if task.done():
                attempt.prefill = None  # it has ended and cannot be cancelled
        return self.driver.attempt is attempt

    async def await_prefill_worker_loss(self, attempt: SentAttempt) -> None:
        """After a failed decode leg, wait briefly for news that the prefill worker died.

        The decode worker may notice the death first, because it pulls the KV.
        """
        driver = self.driver
        if driver.journey.state is not State.DECODING or attempt.placement.decision.prefill is None:
            return
        for _ in range(PREFILL_LOSS_CHECKS):
            is_known = attempt.prefill_lost is not None or attempt.prefill_refused is not None
            if is_known or driver.attempt is not attempt:
                return
            if self._model.placer.prefill_worker_left(attempt.placement):
                return
            await asyncio.sleep(PREFILL_LOSS_CHECK_S)

    def note_cached(self, attempt: SentAttempt, cached_tokens: int, prompt_tokens: int | None) -> None:
        """Note the engine's count of cached tokens; usage shows that of the attempt with the first token."""
        placement = attempt.placement
        if placement.decision.prefill is not None:
            attempt.prefill_cached_tokens = cached_tokens
            if attempt.kept is not None and cached_tokens < (expected_tokens(placement) or 0):
                placement.compute_all()  # it did not fetch
        if self.driver.attempt is not attempt:
            return  # the attempt was abandoned meanwhile
        if self._first_attempt is None or attempt is self._first_attempt:
            self.cached_tokens, self.cache_known = cached_tokens, True
            self.prompt_tokens = prompt_tokens
        self._model.note_cached_tokens(placement, cached_tokens, prompt_tokens)

    # The journey's commands

    async def _perform(self, commands: Sequence[Command]) -> None:
        todo = deque(commands)
        while todo:
            command = todo.popleft()
            match command:
                case Place():
                    todo.extend(await self._place(command))
                case SendPrefill():
                    todo.extend(await self._send_prefill())
                case SendDecode():
                    todo.extend(await self._send_decode(command.params))
                case _:
                    self._perform_now((command,))

    def _perform_now(self, commands: Sequence[Command]) -> None:
        """Carry out commands that need no waiting."""
        for command in commands:
            match command:
                case Abandon():
                    self._abandon(command.reason)
                case End():
                    self.finish = command.finish
                case Fail():
                    self.driver.error = command.error
                case _:
                    raise RuntimeError(f"{type(command).__name__} has to be awaited")

    async def _place(self, command: Place) -> Sequence[Command]:
        token_ids = self._request.token_ids
        driver = self.driver
        generated = driver.journey.generated
        if generated:
            token_ids = token_ids + array("I", generated)
        try:
            placement = await self._model.place(
                self._request,
                token_ids,
                attempt=command.attempt,
                excluded=command.excluded,
                kv_lost_from=command.kv_lost_from,
                plans=command.plans,
                may_pull_kv=driver.journey.may_pull_kv,
                on_picked=None if generated or self._spans is not None else self._send_picked,
            )
        except (RoutingRefused, InvalidRequest) as error:
            return driver.journey.handle(NotPlaced(error))
        if driver.journey.state is _DONE:
            self._model.release(placement)
            return ()
        if driver.last_loss is not None:
            self._instrumentation.sent_again(self._request, driver.last_loss, streaming=bool(generated))
        now_s = time.monotonic() if self._sent is None else self._sent[1]
        attempt = SentAttempt(placement, placed_s=now_s)
        if self._instrumentation.traffic is not None or self._spans is not None:
            self.trail.append(attempt)
        if self._times.placed_s is None:
            self._times.placed_s = now_s
        phase = Phase.PREFILLING if placement.shape is _SYNCHRONOUS else _FIRST_TOKEN
        self.watch.enter(Phase.RESUMING if generated else phase)
        return driver.placed(attempt)

    def _send_picked(self, placement: Placement) -> None:
        """Send an aggregated leg before its placement is booked: the worker begins while the router counts.

        Does nothing where that cannot be done at once; :meth:`_send_decode` waits, or raises why.
        """
        began_s = time.perf_counter()
        request = last_leg(
            self._request, placement, kv_transfer_params=None, time_left_s=self.watch.time_left_s
        )
        sent_s = time.monotonic()
        try:
            stream = self._transport.open_now(placement.decode_address, request)
        except KvrouterError:
            stream = None
        if stream is not None:
            self._sent = stream, sent_s
        placement.sending_s = time.perf_counter() - began_s

    async def _send_prefill(self) -> Sequence[Command]:
        attempt = self.driver.current_attempt
        if attempt.placement.shape is Shape.BOOTSTRAP:
            attempt.prefill_runs_in_parallel = True
            task = asyncio.get_running_loop().create_task(self._run_prefill_in_parallel(attempt))
            task.add_done_callback(lambda ended: self._prefill_ended(attempt, ended))
            attempt.prefill_task = task
            return ()
        leg = self._run_prefill(attempt)
        outcome = await prefill_outcome(attempt.placement, leg, self._request.call)
        return self.driver.prefill_ended(attempt, outcome, time.monotonic())

    async def _run_prefill(self, attempt: SentAttempt) -> KvTransferParams | None:
        """Send the prefill leg and read it to its end; its KV then waits for the decode worker."""
        placement = attempt.placement
        pulled = None
        if placement.prefill_pick.pulled_blocks:
            pulled = await self._keep_kv(attempt)
            if self.driver.error is not None:  # it ended meanwhile
                raise self.driver.error
        n_pulled = _pulled_tokens(placement)
        time_left_s = self.watch.time_left_s
        request = prefill_leg(self._request, placement, time_left_s=time_left_s, kv_transfer_params=pulled)
        request = self._traced(attempt, request)
        attempt.prefill_sent_s = time.monotonic()
        stream = await self._transport.open(placement.prefill_address, request)
        attempt.prefill = stream
        if self.driver.error is not None:  # it ended while the leg was sent, without a stream to cancel
            stream.cancel(self.driver.error.code)
        try:
            params = await read_prefill(stream, partial(self.note_cached, attempt))
        except KvrouterError:
            if n_pulled:
                self._model.instrumentation.kv_pulled("failed", n_pulled)
            raise
        if attempt.kept is not None:
            has_pulled = placement.prefill_pick.pulled_blocks > 0
            self._model.instrumentation.kv_pulled("pulled" if has_pulled else "failed", n_pulled)
            if not has_pulled:
                attempt.kept.cancel("the prefill worker computed")
            attempt.kept = None
        self.driver.prefilled(attempt, time.monotonic())
        return params

    async def _keep_kv(self, attempt: SentAttempt) -> KvTransferParams | None:
        """Make the decode worker keep what it has of the prompt; return where the prefill worker fetches it,
        or None: then that computes it.
        """
        placement = attempt.placement
        leg = keeping_leg(self._request, placement, time_left_s=KEEP_LIMIT_S)
        try:
            async with asyncio.timeout(KEEP_LIMIT_S):
                attempt.kept = await self._transport.open(placement.decode_address, leg)
                params = await read_prefill(attempt.kept, lambda *_: None)
        except (KvrouterError, TimeoutError):
            params = None  # the prefill worker computes
        if not params:
            self._model.instrumentation.kv_pulled("not_kept", _pulled_tokens(placement))
            placement.compute_all()
            if attempt.kept is not None:
                attempt.kept.cancel("the prefill worker computes")
                attempt.kept = None
        return params or None

    async def _run_prefill_in_parallel(self, attempt: SentAttempt) -> None:
        """Run a bootstrap handoff's prefill leg. Its failure cancels decode, whose KV would never come."""
        try:
            await self._run_prefill(attempt)
        except InvalidRequest as error:
            attempt.prefill_refused = error
            if attempt.decode is not None and self.driver.journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg was refused")
        except KvrouterError as error:
            attempt.prefill_lost = lost_leg(attempt.placement.prefill_pick, error, self._request.call)
            if attempt.decode is not None and self.driver.journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg failed")
        finally:
            attempt.prefill_runs_in_parallel = False

    def _prefill_ended(self, attempt: SentAttempt, task: asyncio.Task[None]) -> None:
        """Log an internal error of the task, which no caller awaits, and end the decode leg."""
        if task.cancelled() or task.exception() is None:
            return
        self._instrumentation.internal_error(self._request, task.exception())
        if attempt is self.driver.attempt:
            error = InternalError("the prefill leg could not be driven; the log has the traceback")
            self.driver.error = error
            if attempt.decode is not None:
                attempt.decode.cancel(error.code)

    async def _send_decode(self, params: KvTransferParams | None) -> Sequence[Command]:
        driver, attempt = self.driver, self.driver.current_attempt
        if self._sent is not None:
            (attempt.decode, attempt.last_sent_s), self._sent = self._sent, None
            return driver.decode_sent(attempt, attempt.last_sent_s)
        try:
            if params is not None:
                try:
                    self._model.pick_decode_again(attempt.placement)
                except RoutingRefused as refused:
                    return driver.decode_not_placed(attempt, refused)
            request = last_leg(
                self._request,
                attempt.placement,
                kv_transfer_params=params,
                time_left_s=self.watch.time_left_s,
            )
            if self.watch.phase is Phase.PREFILLING:
                self.watch.enter(Phase.FIRST_TOKEN)
            request = self._traced(attempt, request)
            attempt.last_sent_s = time.monotonic()
            stream = await open_decode(self._transport, attempt.placement.decode_address, request)
            attempt.decode = stream
        except InvalidRequest as error:
            return driver.journey.handle(LegRefused(error))
        except KvrouterError as error:
            lost = lost_leg(attempt.placement.decision.decode, error, self._request.call)
            return driver.lost(attempt, lost, time.monotonic())
        if driver.error is not None:  # it ended while the leg was sent, without a stream to cancel
            stream.cancel(driver.error.code)
        return driver.decode_sent(attempt, time.monotonic())

    def _traced(self, attempt: SentAttempt, leg: EngineRequest) -> EngineRequest:
        """Return the leg with its own span, where requests are traced."""
        return leg if self._spans is None else structs.replace(leg, trace=self._spans.leg(attempt, leg.leg))

    def first_tokens(self, *, more_come: bool) -> None:
        """Note the first tokens of the current attempt.

        If ``more_come``, what the client need not wait for is counted after they were written: the answer is
        flushed in the next turn of the event loop.
        """
        attempt, now_s = self.driver.current_attempt, time.monotonic()
        if self._times.first_token_s is None:
            self._times.first_token_s = now_s
        if self._first_attempt is None:
            self._first_attempt = attempt
        if not attempt.prefill_runs_in_parallel:
            attempt.prefill = None  # its KV has been fetched
        self.driver.first_tokens(now_s)
        if more_come:
            self.watch.enter(_STREAMING)
        self._uncounted = attempt
        if more_come and attempt.placement.decision.prefill is None:  # a pair's prefill leg may end meanwhile
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._count_first_tokens)
        else:
            self._count_first_tokens()

    def _count_first_tokens(self) -> None:
        """Count the first tokens of an attempt, unless that was done."""
        attempt, self._uncounted = self._uncounted, None
        if attempt is None or attempt.first_token_s is None:
            return
        placement, now_s = attempt.placement, attempt.first_token_s
        if now_s == self._times.first_token_s:
            self._model.note_ttft(placement.decision.request_id, now_s - self._times.begun_s)
        self._model.flows.handed_over(placement, now_s=now_s)
        self.driver.prompt_computed(attempt, now_s)
        self._model.count_first_token(placement)

    def _abandon(self, reason: str) -> None:
        """Cancel both legs and close the leases of the current attempt."""
        if self._sent is not None:
            self._sent[0].cancel(reason)
            self._sent = None
        attempt = self.driver.attempt
        if attempt is None:
            return
        if attempt.prefill_task is not None and not attempt.prefill_task.done():
            attempt.prefill_task.cancel()
        if attempt.decode is not None:
            attempt.decode.cancel(reason)
        for stream in (attempt.prefill, attempt.kept):
            if stream is not None:
                stream.cancel(reason)
        tokens = self.driver.release(time.monotonic(), shows_speed=not self.is_held_back)
        self._model.answered(attempt.placement, tokens=tokens)

    def _too_long(self, kind: TooLong, silent_s: float) -> None:
        """Cancel the legs after a limit was reached; the read that meets their end reports the cause."""
        driver, attempt, timeouts = self.driver, self.driver.attempt, self._timeouts
        if attempt is None:
            return
        cause = "the request's time is up"
        if kind is TooLong.SILENCE:
            cause = f"no token for {silent_s:.3g} s"
            driver.silent(cause, self.watch.progress_s)
        else:
            what, limit_s = {
                TooLong.REQUEST: ("the request took longer than", timeouts.request_s),
                TooLong.PREFILL: ("no prefill within", timeouts.prefill_s),
                TooLong.FIRST_TOKEN: ("no first token within", timeouts.first_token_s),
            }[kind]
            driver.error = DeadlineExceeded(f"{what} {limit_s:g} s")
            driver.late(limit_s, time.monotonic())
        for stream in (attempt.decode, attempt.prefill, attempt.kept):
            if stream is not None:
                stream.cancel(cause)


def _pulled_tokens(placement: Placement) -> int:
    """Return how many tokens of the prompt the prefill worker is to fetch."""
    pick = placement.prefill_pick
    return max(0, pick.pulled_blocks - pick.overlap_blocks) * placement.block_size
