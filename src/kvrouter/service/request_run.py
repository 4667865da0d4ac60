"""Runs one request, from its first attempt to its end: places it, sends its legs, and sends them elsewhere
when one is lost, as the journey says.

It reads no answer but that of a prefill leg; in a bootstrap handoff that runs in a task parallel to the
answer's reader, which is :class:`~kvrouter.service.generation.Generation`.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
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
    Leg,
)
from kvrouter.journey import (
    Abandon,
    ClientLeft,
    Command,
    End,
    Fail,
    Input,
    Journey,
    KvLost,
    LegLost,
    LegRefused,
    NoteFirstToken,
    NotPlaced,
    Place,
    Placed,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.placement.placement import Placement
from kvrouter.placement.placer import last_leg, prefill_leg
from kvrouter.service.attempt import (
    SILENT_SHARE,
    Attempt,
    FailedLegs,
    Output,
    Phase,
    StallWatch,
    Timeouts,
    TooLong,
    attribute_loss,
    attribute_silence,
    lost_leg,
    open_decode,
    prefill_outcome,
    read_prefill,
)
from kvrouter.service.instrumentation import ServiceInstrumentation, Times
from kvrouter.service.model_router import ModelRouter
from kvrouter.service.traffic import LegSpans
from kvrouter.transports.requests.port import RequestPlane

PREFILL_LAST_WORD_S = 0.25
"""How long an answer's end waits for its prefill leg's: they come over two connections."""

PREFILL_NEWS_CHECKS = 25
PREFILL_NEWS_CHECK_S = 0.01
"""How much later than a decode worker its router may learn that a prefill worker died: 0.25 s."""


class RequestRun:
    """The attempts of one request. ``error`` or ``finish`` is set once there is nothing more to come."""

    def __init__(
        self,
        request: GenerateRequest,
        model: ModelRouter,
        plane: RequestPlane,
        *,
        timeouts: Timeouts,
        redispatches_max: int,
        observed: ServiceInstrumentation,
        times: Times,
        spans: LegSpans | None = None,
    ) -> None:
        self.journey = Journey(
            request.sampling,
            redispatches_max=redispatches_max,
            is_plain=request.call is None or request.call.resumable,
        )
        self.watch = StallWatch(timeouts, self._too_long)
        self.output = Output(self.journey, model, self.watch)
        self.attempt: Attempt | None = None
        """What is under way; None before the first decision, and when nothing is any more."""
        self.placement: Placement | None = None
        """Where the current (or last) attempt went; None before the first decision."""
        self.error: KvrouterError | None = None
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.cache_known = False
        """Whether an engine said how many prompt tokens it had cached."""
        self.is_held_back = False
        """Whether its client ever kept the answer waiting."""
        self.trail: list[Attempt] = []
        """All attempts, where traffic is recorded or traced."""
        self._spans = spans
        self._first_attempt: Attempt | None = None
        """The attempt that brought the first token."""
        self._request = request
        self._model = model
        self._plane = plane
        self._timeouts = timeouts
        self._observed = observed
        self._times = times
        self._silence: str | None = None
        self._lost_leg: LegLost | None = None
        self._failed_legs = FailedLegs(model)

    async def begin(self) -> None:
        """Place the request and send its legs; a request that has ended stays ended."""
        if self.journey.state is not State.DONE:
            await self._perform(self.journey.begin())

    def handle(self, event: Input) -> None:
        """Something came that needs no waiting: the first tokens, or an end."""
        self._perform_now(self.journey.handle(event))

    def stop(self, reason: str) -> None:
        """Nobody waits for more: cancel what runs, close the leases. Idempotent."""
        self.journey.handle(ClientLeft(reason))
        self._abandon(reason)
        self._failed_legs.end()
        self.watch.stop()

    @property
    def first_placement(self) -> Placement | None:
        """Where the attempt went that brought the first token; None until it has come."""
        return None if self._first_attempt is None else self._first_attempt.placement

    @property
    def is_sent(self) -> bool:
        """Whether all legs of the current attempt have been sent."""
        attempt = self.attempt
        if attempt is None or attempt.decode is None:
            return False
        task = attempt.prefill_task
        return task is None or task.done() or attempt.prefill is not None

    def drop_call(self) -> None:
        """Empty the client's call: no leg can be made of it any more. Idempotent."""
        if self._request.call is not None:
            self._request.call.body = b""
            self.journey.can_be_sent = False

    async def lose(self, attempt: Attempt, error: KvrouterError) -> None:
        """The last leg is lost; the sibling's own failure, when there is one, is the better reason."""
        if attempt.refused is not None and self.journey.state is State.DECODING:
            self._perform_now(self.journey.handle(LegRefused(attempt.refused)))
            return
        lost = lost_leg(attempt.placement.decision.decode, error)
        if self.journey.state is State.DECODING and self._model.prefill_worker_left(attempt.placement):
            pick = attempt.placement.prefill_pick  # its KV went with it: the decode worker did nothing wrong
            lost = LegLost(pick.leg, pick.rank.worker_id, error.message)
        await self._perform(self._lost(attempt, lost))

    async def lose_kv(self, attempt: Attempt, loss: KvLoss, error: KvrouterError) -> None:
        """The decode worker did not get the prefill worker's KV; the prefill leg's own failure, when there is
        one, is the better reason.
        """
        decision = attempt.placement.decision
        if decision.prefill is None or self.journey.state is not State.DECODING:
            await self.lose(attempt, error)  # it had all that it needed: no KV was due any more
            return
        sender, receiver = decision.prefill.rank.worker_id, decision.decode.rank.worker_id
        why = attempt.placement.without_addresses(error.message)
        lost = KvLost(sender, receiver, loss, why, error.answer)
        attempt.kv_loss = loss
        self._observed.kv_lost(self._request, lost)
        if self.error is not None or attempt.lost:
            await self.lose(attempt, error)
            return
        self._silence = None
        if not self._model.prefill_worker_left(attempt.placement):
            if loss is KvLoss.BROKEN:  # also what an engine's failure is taken for that may be the request's
                self._failed_legs.add_kv_lost(attempt)
            else:
                self._model.kv_lost(attempt.placement, since_s=attempt.last_sent_s)
        self._lost_leg = LegLost(Leg.PREFILL, sender, lost.why)
        await self._perform(self.journey.handle(lost))

    async def heard_prefill(self, attempt: Attempt) -> bool:
        """Give the prefill leg's last word time to arrive: it was said before decode began, on another wire.

        False when the request ended meanwhile.
        """
        task = attempt.prefill_task
        if task is not None and not task.done():
            await asyncio.wait((task,), timeout=PREFILL_LAST_WORD_S)
            if task.done():
                attempt.prefill = None  # nothing of it is left to be cancelled
        return self.attempt is attempt

    async def prefill_worker_leaves(self, attempt: Attempt) -> None:
        """A decode leg gave up: give the news that its prefill worker died, if it did, time to come.

        The decode worker may hear of it first, because it pulls the KV.
        """
        if self.journey.state is not State.DECODING or attempt.placement.decision.prefill is None:
            return
        for _ in range(PREFILL_NEWS_CHECKS):
            if attempt.lost or attempt.refused is not None or self.attempt is not attempt:
                return
            if self._model.prefill_worker_left(attempt.placement):
                return
            await asyncio.sleep(PREFILL_NEWS_CHECK_S)

    def note_cached(self, attempt: Attempt, cached_tokens: int, prompt_tokens: int | None) -> None:
        """The engine's own count of what it had cached; the client's usage shows that of its first token."""
        if attempt.placement.decision.prefill is not None:
            attempt.prefill_cached_tokens = cached_tokens
        if self.attempt is not attempt:
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
                case NoteFirstToken():
                    self._first_token()
                case Abandon():
                    self._abandon(command.reason)
                case End():
                    self.finish = command.finish
                case Fail():
                    self.error = command.error
                case _:
                    raise RuntimeError(f"{type(command).__name__} has to be awaited")

    async def _place(self, command: Place) -> Sequence[Command]:
        token_ids = self._request.token_ids
        generated = self.journey.generated
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
            return self.journey.handle(NotPlaced(error))
        if self.journey.state is State.DONE:
            self._model.release(placement)
            return []
        if self._lost_leg is not None:
            self._observed.sent_again(self._request, self._lost_leg, streaming=bool(generated))
        now_s = time.monotonic()
        placement.resumed_tokens = len(generated)
        self.attempt = Attempt(placement, placed_s=now_s)
        self.placement = placement
        self.output.begin(placement)
        if self._observed.traffic is not None or self._spans is not None:
            self.trail.append(self.attempt)
        if self._times.placed_s is None:
            self._times.placed_s = now_s
        is_ahead = placement.shape is Shape.SYNCHRONOUS
        phase = Phase.PREFILLING if is_ahead else Phase.FIRST_TOKEN
        self.watch.enter(Phase.RESUMING if generated else phase)
        return self.journey.handle(Placed(placement.shape))

    async def _send_prefill(self) -> Sequence[Command]:
        attempt = self._held()
        if attempt.placement.shape is Shape.BOOTSTRAP:
            task = asyncio.get_running_loop().create_task(self._run_prefill_in_parallel(attempt))
            task.add_done_callback(lambda ended: self._prefill_ended(attempt, ended))
            attempt.prefill_task = task
            return []
        outcome = await prefill_outcome(attempt.placement, self._run_prefill(attempt))
        if isinstance(outcome, LegLost):
            return self._lost(attempt, outcome)
        if isinstance(outcome, LegRefused):
            worker_id = attempt.placement.prefill_pick.rank.worker_id
            why = f"it refused the prefill leg: {outcome.error.message}"
            self._lost_leg = LegLost(Leg.PREFILL, worker_id, attempt.placement.without_addresses(why))
            attempt.lost_leg = Leg.PREFILL
        return self.journey.handle(outcome)

    async def _run_prefill(self, attempt: Attempt) -> KvTransferParams | None:
        """Send the prefill leg and read it to its end; its KV then waits for the decode worker."""
        placement = attempt.placement
        request = prefill_leg(
            self._request,
            placement,
            resumed_tokens=len(self.journey.generated),
            time_left_s=self.watch.time_left_s,
        )
        request = self._traced(attempt, request)
        attempt.prefill_sent_s = time.monotonic()
        stream = await self._plane.open(placement.prefill_address, request)
        attempt.prefill = stream
        if self.error is not None:  # the time was up while the leg was sent, and nothing was there to cancel
            stream.cancel(self.error.code)
        params = await read_prefill(stream, partial(self.note_cached, attempt))
        attempt.prefill_done_s = time.monotonic()
        self._model.prefill_done(placement)
        self._failed_legs.prefilled()
        return params

    async def _run_prefill_in_parallel(self, attempt: Attempt) -> None:
        """The prefill leg of a bootstrap handoff. When it fails, decode waits for KV that never comes."""
        try:
            await self._run_prefill(attempt)
        except InvalidRequest as error:
            attempt.refused = error
            if attempt.decode is not None and self.journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg was refused")
        except KvrouterError as error:
            attempt.lost.append(lost_leg(attempt.placement.prefill_pick, error))
            if attempt.decode is not None and self.journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg failed")

    def _prefill_ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        """Nobody awaits the task: a mistake of ours in it must neither vanish nor leave decode waiting."""
        if task.cancelled() or task.exception() is None:
            return
        self._observed.mistake(self._request, task.exception())
        if attempt is self.attempt:
            self.error = InternalError("the prefill leg could not be driven; the log has the traceback")
            if attempt.decode is not None:
                attempt.decode.cancel(self.error.code)

    async def _send_decode(self, params: KvTransferParams | None) -> Sequence[Command]:
        attempt = self._held()
        try:
            if params is not None:
                self._model.pick_decode_again(attempt.placement)
            request = last_leg(
                self._request,
                attempt.placement,
                resumed_tokens=len(self.journey.generated),
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
            return self.journey.handle(LegRefused(error))
        except KvrouterError as error:
            return self._lost(attempt, lost_leg(attempt.placement.decision.decode, error))
        if self.error is not None:  # it ended while the leg was sent, and nothing was there to cancel
            stream.cancel(self.error.code)
        if attempt.refused is not None:
            return self.journey.handle(LegRefused(attempt.refused))
        if attempt.lost:
            return self._lost(attempt, attempt.lost[0])
        return []

    def _traced(self, attempt: Attempt, leg: EngineRequest) -> EngineRequest:
        """Return the leg under a span of its own, where requests are traced here."""
        return leg if self._spans is None else structs.replace(leg, trace=self._spans.leg(attempt, leg.leg))

    def _lost(self, attempt: Attempt, lost: LegLost) -> Sequence[Command]:
        if self.error is not None:  # we ended it ourselves: the deadline passed
            return self.journey.handle(ClientLeft(self.error.code))
        lost = attempt.lost[0] if attempt.lost else lost
        lost = replace(lost, why=attempt.placement.without_addresses(lost.why))
        state = self.journey.state
        if self._silence is not None:
            lost, self._silence = replace(lost, why=self._silence), None
            attribute_silence(self._model, attempt, state, heard_s=self.watch.heard_s)
        else:
            attribute_loss(self._model, attempt, lost, state, self._failed_legs)
        self._lost_leg = lost
        attempt.lost_leg = lost.leg
        return self.journey.handle(lost)

    def _held(self) -> Attempt:
        if self.attempt is None:
            raise RuntimeError("the journey sends a leg before it was placed")
        return self.attempt

    def _first_token(self) -> None:
        attempt = self._held()
        attempt.first_token_s = time.monotonic()
        if self._times.first_token_s is None:
            self._times.first_token_s = attempt.first_token_s
        if self._first_attempt is None:
            self._first_attempt = attempt
        if attempt.prefill_task is None or attempt.prefill_task.done():
            attempt.prefill = None  # its KV has been fetched: nothing waits there any more
        self._failed_legs.begun()
        self._model.first_token(attempt.placement)
        self.watch.enter(Phase.STREAMING)

    def _abandon(self, reason: str) -> None:
        """Cancel both legs and close the leases of the current attempt."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        attempt.ended_s = time.monotonic()
        if attempt.prefill_task is not None and not attempt.prefill_task.done():
            attempt.prefill_task.cancel()
        if attempt.decode is not None:
            attempt.decode.cancel(reason)
        if attempt.prefill is not None:
            attempt.prefill.cancel(reason)
        placement = attempt.placement
        # A rank's decode steps are learned from how many tokens came in what time.
        tokens = 0 if self.is_held_back else len(self.journey.generated) - placement.resumed_tokens
        self._model.release(placement, tokens=tokens)

    def _too_long(self, kind: TooLong, silent_s: float) -> None:
        """A limit was reached: cancel the legs, and the read that meets their end reports why."""
        attempt = self.attempt
        if attempt is None:
            return
        if kind is TooLong.REQUEST:
            limit_s = self._timeouts.request_s
            self._time_is_up(attempt, f"the request took longer than {limit_s:g} s", limit_s)
        elif kind is TooLong.PREFILL:
            limit_s = self._timeouts.prefill_s
            self._time_is_up(attempt, f"no prefill within {limit_s:g} s", limit_s)
        elif kind is TooLong.FIRST_TOKEN:
            limit_s = self._timeouts.first_token_s
            self._time_is_up(attempt, f"no first token within {limit_s:g} s", limit_s)
        else:
            self._silence = f"no token for {silent_s:.3g} s"
        for stream in (attempt.decode, attempt.prefill):
            if stream is not None:
                stream.cancel(self._silence or "the request's time is up")

    def _time_is_up(self, attempt: Attempt, why: str, limit_s: float) -> None:
        """The request fails. A worker that had a good part of its time, and brought nothing, is silent."""
        self.error = DeadlineExceeded(why)
        state = self.journey.state
        if state is not State.STREAMING:
            before_s = time.monotonic() - SILENT_SHARE * limit_s
            heard_s = self.watch.heard_s
            attribute_silence(self._model, attempt, state, heard_s=heard_s, before_s=before_s)
