"""Runs one request, from its first attempt to its end: places it, sends its legs, and sends them elsewhere
when one is lost, as the journey says.

It reads no answer but that of a prefill leg; in a bootstrap handoff that runs in a task parallel to the
answer's reader, which is :class:`~kvrouter.router.generation.Generation`.
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
from kvrouter.kernel.placement.legs import last_leg, prefill_leg
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.request_driver import Attempt, RequestDriver
from kvrouter.router.instrumentation import ServiceInstrumentation, Times
from kvrouter.router.legs import lost_leg, open_decode, prefill_outcome, read_prefill
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.stall_watch import Phase, StallWatch, Timeouts, TooLong
from kvrouter.router.traffic import LegSpans
from kvrouter.transports.requests.port import EngineStream, RequestTransport

PREFILL_LAST_WORD_S = 0.25
"""How long an answer's end waits for its prefill leg's: they come over two connections."""

PREFILL_NEWS_CHECKS = 25
PREFILL_NEWS_CHECK_S = 0.01
"""How much later than a decode worker its router may learn that a prefill worker died: 0.25 s."""


@dataclass(slots=True)
class SentAttempt(Attempt):
    """An attempt with the streams of its legs; all of them are cancelled when it is abandoned."""

    prefill: EngineStream | None = None
    prefill_task: asyncio.Task[None] | None = None
    decode: EngineStream | None = None


class RequestRun:
    """Sends the legs of one request, as its ``driver`` says. The driver's ``error``, or ``finish``, is set
    once there is nothing more to come.
    """

    def __init__(
        self,
        request: GenerateRequest,
        model: ModelRouter,
        plane: RequestTransport,
        *,
        timeouts: Timeouts,
        redispatches_max: int,
        observed: ServiceInstrumentation,
        times: Times,
        spans: LegSpans | None = None,
    ) -> None:
        self.driver: RequestDriver[SentAttempt] = RequestDriver(
            request.sampling,
            model.placer,
            redispatches_max=redispatches_max,
            is_plain=request.call is None or request.call.resumable,
        )
        self.watch = StallWatch(timeouts, self._too_long)
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.cache_known = False
        """Whether an engine said how many prompt tokens it had cached."""
        self.is_held_back = False
        """Whether its client ever kept the answer waiting."""
        self.trail: list[SentAttempt] = []
        """All attempts, where traffic is recorded or traced."""
        self._spans = spans
        self._first_attempt: SentAttempt | None = None
        """The attempt that brought the first token."""
        self._request = request
        self._model = model
        self._plane = plane
        self._timeouts = timeouts
        self._observed = observed
        self._times = times

    async def begin(self) -> None:
        """Place the request and send its legs; a request that has ended stays ended."""
        journey = self.driver.journey
        if journey.state is not State.DONE:
            await self._perform(journey.begin())

    def handle(self, event: Finished | LegRefused) -> None:
        """The last leg ended, so that nothing is sent any more."""
        self._perform_now(self.driver.journey.handle(event))

    def stop(self, reason: str) -> None:
        """Nobody waits for more: cancel what runs, close the leases. Idempotent."""
        self.driver.journey.handle(ClientLeft(reason))
        self._abandon(reason)
        self.driver.end(time.monotonic())
        self.watch.stop()

    @property
    def first_placement(self) -> Placement | None:
        """Where the attempt went that brought the first token; None until it has come."""
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
        """Empty the client's call: no leg can be made of it any more. Idempotent."""
        if self._request.call is not None:
            self._request.call.body = b""
            self.driver.journey.can_be_sent = False

    async def lose(self, attempt: SentAttempt, error: KvrouterError) -> None:
        """The last leg is lost."""
        lost = lost_leg(attempt.placement.decision.decode, error)
        await self._perform(self.driver.last_leg_lost(attempt, lost, time.monotonic()))

    async def lose_kv(self, attempt: SentAttempt, loss: KvLoss, error: KvrouterError) -> None:
        """The decode worker did not get the prefill worker's KV."""
        event = self.driver.kv_loss(attempt, loss, error.message, error.answer)
        if event is None:
            await self.lose(attempt, error)
            return
        self._observed.kv_lost(self._request, event)
        lost = lost_leg(attempt.placement.decision.decode, error)
        await self._perform(self.driver.kv_lost(attempt, event, lost, time.monotonic()))

    async def heard_prefill(self, attempt: SentAttempt) -> bool:
        """Give the prefill leg's last word time to arrive: it was said before decode began, on another wire.

        False when the request ended meanwhile.
        """
        task = attempt.prefill_task
        if task is not None and not task.done():
            await asyncio.wait((task,), timeout=PREFILL_LAST_WORD_S)
            if task.done():
                attempt.prefill = None  # nothing of it is left to be cancelled
        return self.driver.attempt is attempt

    async def prefill_worker_leaves(self, attempt: SentAttempt) -> None:
        """A decode leg gave up: give the news that its prefill worker died, if it did, time to come.

        The decode worker may hear of it first, because it pulls the KV.
        """
        driver = self.driver
        if driver.journey.state is not State.DECODING or attempt.placement.decision.prefill is None:
            return
        for _ in range(PREFILL_NEWS_CHECKS):
            is_known = attempt.prefill_lost is not None or attempt.prefill_refused is not None
            if is_known or driver.attempt is not attempt:
                return
            if self._model.placer.prefill_worker_left(attempt.placement):
                return
            await asyncio.sleep(PREFILL_NEWS_CHECK_S)

    def note_cached(self, attempt: SentAttempt, cached_tokens: int, prompt_tokens: int | None) -> None:
        """The engine's own count of what it had cached; the client's usage shows that of its first token."""
        if attempt.placement.decision.prefill is not None:
            attempt.prefill_cached_tokens = cached_tokens
        if self.driver.attempt is not attempt:
            return  # it was given up meanwhile
        if self._first_attempt is None or attempt is self._first_attempt:
            self.cached_tokens, self.cache_known = cached_tokens, True
        self._model.note_cached_tokens(attempt.placement, cached_tokens, prompt_tokens)

    # What the journey says

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
        """Do what needs no waiting."""
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
            )
        except (RoutingRefused, InvalidRequest) as error:
            return driver.journey.handle(NotPlaced(error))
        if driver.journey.state is State.DONE:
            self._model.release(placement)
            return ()
        if driver.last_loss is not None:
            self._observed.sent_again(self._request, driver.last_loss, streaming=bool(generated))
        now_s = time.monotonic()
        attempt = SentAttempt(placement, placed_s=now_s)
        if self._observed.traffic is not None or self._spans is not None:
            self.trail.append(attempt)
        if self._times.placed_s is None:
            self._times.placed_s = now_s
        is_ahead = placement.shape is Shape.SYNCHRONOUS
        phase = Phase.PREFILLING if is_ahead else Phase.FIRST_TOKEN
        self.watch.enter(Phase.RESUMING if generated else phase)
        return driver.placed(attempt)

    async def _send_prefill(self) -> Sequence[Command]:
        attempt = self.driver.held
        if attempt.placement.shape is Shape.BOOTSTRAP:
            attempt.prefill_runs_in_parallel = True
            task = asyncio.get_running_loop().create_task(self._run_prefill_in_parallel(attempt))
            task.add_done_callback(lambda ended: self._prefill_ended(attempt, ended))
            attempt.prefill_task = task
            return ()
        outcome = await prefill_outcome(attempt.placement, self._run_prefill(attempt))
        return self.driver.prefill_ended(attempt, outcome, time.monotonic())

    async def _run_prefill(self, attempt: SentAttempt) -> KvTransferParams | None:
        """Send the prefill leg and read it to its end; its KV then waits for the decode worker."""
        placement = attempt.placement
        request = prefill_leg(self._request, placement, time_left_s=self.watch.time_left_s)
        request = self._traced(attempt, request)
        attempt.prefill_sent_s = time.monotonic()
        stream = await self._plane.open(placement.prefill_address, request)
        attempt.prefill = stream
        if self.driver.error is not None:  # it ended while the leg was sent, and nothing was there to cancel
            stream.cancel(self.driver.error.code)
        params = await read_prefill(stream, partial(self.note_cached, attempt))
        self.driver.prefilled(attempt, time.monotonic())
        return params

    async def _run_prefill_in_parallel(self, attempt: SentAttempt) -> None:
        """The prefill leg of a bootstrap handoff. When it fails, decode waits for KV that never comes."""
        try:
            await self._run_prefill(attempt)
        except InvalidRequest as error:
            attempt.prefill_refused = error
            if attempt.decode is not None and self.driver.journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg was refused")
        except KvrouterError as error:
            attempt.prefill_lost = lost_leg(attempt.placement.prefill_pick, error)
            if attempt.decode is not None and self.driver.journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg failed")
        finally:
            attempt.prefill_runs_in_parallel = False

    def _prefill_ended(self, attempt: SentAttempt, task: asyncio.Task[None]) -> None:
        """Nobody awaits the task: a mistake of ours in it must neither vanish nor leave decode waiting."""
        if task.cancelled() or task.exception() is None:
            return
        self._observed.mistake(self._request, task.exception())
        if attempt is self.driver.attempt:
            error = InternalError("the prefill leg could not be driven; the log has the traceback")
            self.driver.error = error
            if attempt.decode is not None:
                attempt.decode.cancel(error.code)

    async def _send_decode(self, params: KvTransferParams | None) -> Sequence[Command]:
        driver, attempt = self.driver, self.driver.held
        try:
            if params is not None:
                self._model.pick_decode_again(attempt.placement)
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
            stream = await open_decode(self._plane, attempt.placement.decode_address, request)
            attempt.decode = stream
        except InvalidRequest as error:
            return driver.journey.handle(LegRefused(error))
        except KvrouterError as error:
            lost = lost_leg(attempt.placement.decision.decode, error)
            return driver.lost(attempt, lost, time.monotonic())
        if driver.error is not None:  # it ended while the leg was sent, and nothing was there to cancel
            stream.cancel(driver.error.code)
        return driver.decode_sent(attempt, time.monotonic())

    def _traced(self, attempt: SentAttempt, leg: EngineRequest) -> EngineRequest:
        """Return the leg under a span of its own, where requests are traced here."""
        return leg if self._spans is None else structs.replace(leg, trace=self._spans.leg(attempt, leg.leg))

    def first_tokens(self) -> None:
        """The first tokens of the attempt under way came."""
        driver, attempt, now_s = self.driver, self.driver.held, time.monotonic()
        if self._times.first_token_s is None:
            self._times.first_token_s = now_s
        if self._first_attempt is None:
            self._first_attempt = attempt
        if not attempt.prefill_runs_in_parallel:
            attempt.prefill = None  # its KV has been fetched: nothing waits there any more
        self._model.flows.handed_over(attempt.placement, now_s=now_s)
        driver.first_tokens(now_s)
        self._model.count_first_token(attempt.placement)
        self.watch.enter(Phase.STREAMING)

    def _abandon(self, reason: str) -> None:
        """Cancel both legs and close the leases of the current attempt."""
        attempt = self.driver.attempt
        if attempt is None:
            return
        if attempt.prefill_task is not None and not attempt.prefill_task.done():
            attempt.prefill_task.cancel()
        if attempt.decode is not None:
            attempt.decode.cancel(reason)
        if attempt.prefill is not None:
            attempt.prefill.cancel(reason)
        tokens = self.driver.release(time.monotonic(), shows_speed=not self.is_held_back)
        self._model.answered(attempt.placement, tokens=tokens)

    def _too_long(self, kind: TooLong, silent_s: float) -> None:
        """A limit was reached: cancel the legs, and the read that meets their end reports why."""
        driver, attempt, timeouts = self.driver, self.driver.attempt, self._timeouts
        if attempt is None:
            return
        cause = "the request's time is up"
        if kind is TooLong.SILENCE:
            cause = f"no token for {silent_s:.3g} s"
            driver.silent(cause, self.watch.heard_s)
        else:
            what, limit_s = {
                TooLong.REQUEST: ("the request took longer than", timeouts.request_s),
                TooLong.PREFILL: ("no prefill within", timeouts.prefill_s),
                TooLong.FIRST_TOKEN: ("no first token within", timeouts.first_token_s),
            }[kind]
            driver.error = DeadlineExceeded(f"{what} {limit_s:g} s")
            driver.late(limit_s, time.monotonic())
        for stream in (attempt.decode, attempt.prefill):
            if stream is not None:
                stream.cancel(cause)
