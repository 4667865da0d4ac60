"""The loading dock: does what a request's journey says, and brings its tokens back.

One :class:`Generation` is one request. It is pulled: nothing runs ahead of its reader, so that a slow client
holds back its own engine stream and nobody else's. Only a bootstrap handoff's prefill leg runs beside it.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from kvrouter.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvrouterError,
    RoutingRefused,
)
from kvrouter.core.requests import (
    EngineChunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Usage,
)
from kvrouter.journey.journey import Journey
from kvrouter.journey.words import (
    Abandon,
    ClientLeft,
    Command,
    End,
    Fail,
    Finished,
    FirstTokens,
    LegLost,
    LegRefused,
    NoteFirstToken,
    NotPlaced,
    Place,
    Placed,
    PrefillDone,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.planes.requests.port import HandingStream, RequestPlane, StreamBroken, TokenSink, WorkerFull
from kvrouter.routing.decision import Pick
from kvrouter.service.attempt import Attempt, Times
from kvrouter.service.legs import last_leg, prefill_leg, read_prefill
from kvrouter.service.observed import ServiceObserved
from kvrouter.service.output import Output
from kvrouter.service.placement import Placement, Placer
from kvrouter.service.silence import Patience, Phase, SilenceWatch, TooLong

FINISHED = "finished"
ANSWERED = "answered"
"""Reasons to close that are no failure: the engine's last chunk, or a stop string of the client's."""

PREFILL_LAST_WORD_S = 0.25
"""How long an answer's end waits for its prefill leg's: they come over two connections."""

PREFILL_NEWS_LOOKS = 25
PREFILL_NEWS_LOOK_S = 0.01
"""How much later than a decode worker its router may learn that a prefill worker died: 0.25 s."""


class Generation:
    """The answer to one request, as an async iterator of chunks; use it as a context manager.

    An error is raised by the read that meets it. Leaving the context cancels what still runs and closes every
    lease.
    """

    def __init__(
        self,
        request: GenerateRequest,
        placer: Placer,
        plane: RequestPlane,
        *,
        patience: Patience,
        redispatches_max: int,
        observed: ServiceObserved,
        on_end: Callable[["Generation"], None],
        received_s: float | None = None,
    ) -> None:
        self.request = request
        self.error: KvrouterError | None = None
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self._first_attempt: Attempt | None = None
        """The attempt that brought the first token."""
        self._loop = asyncio.get_running_loop()
        self.times = Times(begun_s=time.monotonic() if received_s is None else received_s)
        self._journey = Journey(request.sampling, redispatches_max=redispatches_max)
        self._placer = placer
        self._plane = plane
        self._patience = patience
        self._observed = observed
        self._on_end = on_end
        self._attempt: Attempt | None = None
        self._last_placement: Placement | None = None
        self._watch = SilenceWatch(patience, self._too_long)
        self._output = Output(self._journey, placer, self._watch)
        self._closed = False
        self._told = False
        self._silence: str | None = None
        self._lost_leg: LegLost | None = None

    @property
    def placement(self) -> Placement | None:
        """Where the current (or last) attempt went; None before the first decision."""
        return self._last_placement

    @property
    def attempts(self) -> int:
        """How many times the request was placed."""
        return self._journey.attempt + 1

    @property
    def resumes(self) -> int:
        """How many times a stream went on at another worker."""
        return self._journey.resumes

    @property
    def usage(self) -> Usage:
        """Tokens so far, counted once, however many workers served them."""
        return Usage(
            prompt_tokens=len(self.request.token_ids),
            completion_tokens=len(self._journey.generated),
            cached_tokens=self.cached_tokens,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close("client left")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineChunk:
        if self._attempt is None:
            await self._begin()
        while True:
            attempt = self._attempt
            if self.error is not None or self.finish is not None or attempt is None:
                return self._end()
            if attempt.decode is None:
                raise RuntimeError("a generation without a decode stream was read")
            watch = self._watch
            watch.heard_s = time.monotonic()  # the time that the client took is nobody's silence
            watch.is_reading = True
            try:
                chunk = await attempt.decode.__anext__()
            except StreamBroken as error:
                await self._lose(attempt, error.message)
                continue
            except StopAsyncIteration:
                await self._lose(attempt, "the stream ended without a last chunk")
                continue
            finally:
                watch.is_reading = False
            if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.CANCELLED:
                await self._prefill_worker_leaves(attempt)
                await self._lose(attempt, chunk.error or "the engine cancelled the request")
                continue
            if chunk.finish is not None and not await self._heard_prefill(attempt):
                continue
            self._take(attempt, chunk)
            return chunk

    async def hand_over(self, sink: TokenSink) -> None:
        """Give ``sink`` tokens in the turn of the loop in which they arrive, where the plane can do that.

        Returns when ``sink`` returned False, or when the next read brings something else: an end, an error,
        another worker's tokens. Raises what ``sink`` raises.
        """
        attempt = self._attempt
        if (
            attempt is None
            or self.error is not None
            or self._journey.state is not State.STREAMING
            or not isinstance(attempt.decode, HandingStream)
        ):
            return
        watch = self._watch
        watch.heard_s = time.monotonic()
        watch.is_reading = True
        try:
            await attempt.decode.hand_over(self._output.noting(sink))
        finally:
            watch.is_reading = False

    async def _heard_prefill(self, attempt: Attempt) -> bool:
        """Give the prefill leg's last word time to arrive: it was said before decode began, on another wire.

        False when the request ended meanwhile.
        """
        task = attempt.prefill_task
        if task is not None and not task.done():
            await asyncio.wait((task,), timeout=PREFILL_LAST_WORD_S)
            if task.done():
                attempt.prefill = None  # nothing of it is left to be cancelled
        return self._attempt is attempt

    async def _begin(self) -> None:
        """Place the request, once; a request that has ended stays ended."""
        if not self._closed and self._journey.state is not State.DONE:
            await self._perform(self._journey.begin())

    def _end(self) -> EngineChunk:
        """There is nothing more to read: tell the error once, or the end that no engine told."""
        if self.error is not None and not self._told:
            self._told = True
            self.close(self.error.code)
            raise self.error
        if self.finish is not None and not self._closed:
            self.close(FINISHED)
            return EngineChunk(finish=self.finish)
        raise StopAsyncIteration

    def abort(self, error: KvrouterError) -> None:
        """End now, with ``error`` for whoever reads."""
        if not self._closed:
            self.error = error
            self.close(error.code)

    def close(self, reason: str) -> None:
        """End now, whatever runs: streams are cancelled, leases closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._journey.handle(ClientLeft(reason))
        self._abandon(reason)
        self._watch.stop()
        self.times.ended_s = time.monotonic()
        self._observed.request_ended(
            self.request,
            error=self.error,
            finished=reason in {ANSWERED, FINISHED},
            times=self.times,
            gaps_s=self._output.gaps_s,
            prompt_tokens=len(self.request.token_ids),
            completion_tokens=len(self._journey.generated),
        )
        self._on_end(self)

    # Reading

    def _take(self, attempt: Attempt, chunk: EngineChunk) -> None:
        """Note what a chunk of the last leg brings."""
        if chunk.cached_tokens is not None and attempt.placement.decision.prefill is None:
            self._note_cached(attempt, chunk.cached_tokens)
        if chunk.token_ids:
            if self._journey.state is State.DECODING:
                self._perform_now(self._journey.handle(FirstTokens()))
                self._output.first(chunk.token_ids)
            else:
                self._output.more(chunk.token_ids)
        if chunk.finish is not None:
            attempt.decode = None
            self._perform_now(self._journey.handle(Finished(chunk.finish)))
            self.close(FINISHED)

    async def _prefill_worker_leaves(self, attempt: Attempt) -> None:
        """A decode leg gave up: give the news that its prefill worker died, if it did, time to come.

        The decode worker may hear of it first, because it pulls the KV.
        """
        if self._journey.state is not State.DECODING or attempt.placement.decision.prefill is None:
            return
        for _ in range(PREFILL_NEWS_LOOKS):
            if attempt.lost or self._closed or self._placer.prefill_worker_left(attempt.placement):
                return
            await asyncio.sleep(PREFILL_NEWS_LOOK_S)

    async def _lose(self, attempt: Attempt, why: str) -> None:
        """The last leg is lost; the sibling's own failure, when there is one, is the better reason."""
        pick = attempt.placement.decision.decode
        if self._journey.state is State.DECODING and self._placer.prefill_worker_left(attempt.placement):
            pick = attempt.placement.prefill_pick  # its KV went with it: the decode worker did nothing wrong
        await self._perform(self._lost(attempt, LegLost(pick.leg, pick.rank.worker_id, why)))

    def _lost(self, attempt: Attempt, lost: LegLost) -> Sequence[Command]:
        if self.error is not None:  # we ended it ourselves: the deadline passed
            return self._journey.handle(ClientLeft(self.error.code))
        lost = attempt.lost[0] if attempt.lost else lost
        lost = replace(lost, why=attempt.placement.without_addresses(lost.why))
        if self._silence is not None:
            lost, self._silence = replace(lost, why=self._silence), None
        self._lost_leg = lost
        return self._journey.handle(lost)

    def _note_cached(self, attempt: Attempt, cached_tokens: int) -> None:
        """The engine's own count of what it had cached; the client's usage shows that of its first token."""
        if self._attempt is not attempt:
            return  # it was given up meanwhile
        if self._first_attempt is None or attempt is self._first_attempt:
            self.cached_tokens = cached_tokens
        self._placer.note_cached_tokens(attempt.placement, cached_tokens)

    # Doing what the journey says

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
        token_ids = self.request.token_ids
        if self._journey.generated:
            token_ids = token_ids + array("I", self._journey.generated)
        try:
            placement = await self._placer.place(
                self.request, token_ids, attempt=command.attempt, excluded=command.excluded
            )
        except (RoutingRefused, InvalidRequest) as error:
            return self._journey.handle(NotPlaced(error))
        if self._journey.state is State.DONE:
            self._placer.release(placement)
            return []
        if self._lost_leg is not None:
            streaming = bool(self._journey.generated)
            self._observed.sent_again(self.request, self._lost_leg, streaming=streaming)
        self._attempt = Attempt(placement)
        self._last_placement = placement
        self._output.begin(placement)
        if self.times.placed_s is None:
            self.times.placed_s = time.monotonic()
        self._watch.enter(Phase.RESUMING if self._journey.generated else Phase.FIRST_TOKEN)
        return self._journey.handle(Placed(placement.shape))

    async def _send_prefill(self) -> Sequence[Command]:
        attempt = self._held()
        if attempt.placement.shape is Shape.BOOTSTRAP:
            task = self._loop.create_task(self._run_prefill_beside(attempt))
            task.add_done_callback(lambda ended: self._prefill_ended(attempt, ended))
            attempt.prefill_task = task
            return []
        pick = attempt.placement.prefill_pick
        try:
            params = await self._run_prefill(attempt)
        except InvalidRequest as error:
            return self._journey.handle(LegRefused(error))
        except KvrouterError as error:
            return self._lost(attempt, _lost_leg(pick, error))
        return self._journey.handle(PrefillDone(pick.rank.worker_id, params))

    async def _run_prefill(self, attempt: Attempt) -> KvTransferParams | None:
        """Send the prefill leg and read it to its end; its KV then waits for the decode worker."""
        placement = attempt.placement
        request = prefill_leg(
            self.request,
            placement,
            resumed_tokens=len(self._journey.generated),
            time_left_s=self._watch.time_left_s,
        )
        stream = await self._plane.open(placement.prefill_address, request)
        attempt.prefill = stream
        if self.error is not None:  # the time was up while the leg was sent, and nothing was there to cancel
            stream.cancel(self.error.code)
        params = await read_prefill(stream, partial(self._note_cached, attempt))
        self._placer.prefill_done(placement)
        return params

    async def _run_prefill_beside(self, attempt: Attempt) -> None:
        """The prefill leg of a bootstrap handoff. When it fails, decode waits for KV that never comes."""
        try:
            await self._run_prefill(attempt)
        except KvrouterError as error:
            attempt.lost.append(_lost_leg(attempt.placement.prefill_pick, error))
            if attempt.decode is not None and self._journey.state is not State.STREAMING:
                attempt.decode.cancel("its prefill leg failed")

    def _prefill_ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        """Nobody awaits the task: a mistake of ours in it must neither vanish nor leave decode waiting."""
        if task.cancelled() or task.exception() is None:
            return
        self._observed.mistake(self.request, task.exception())
        if attempt is self._attempt:
            self.error = InternalError("the prefill leg could not be driven; the log has the traceback")
            if attempt.decode is not None:
                attempt.decode.cancel(self.error.code)

    async def _send_decode(self, params: KvTransferParams | None) -> Sequence[Command]:
        attempt = self._held()
        try:
            if params is not None:
                self._placer.pick_decode_again(attempt.placement)
            request = last_leg(
                self.request,
                attempt.placement,
                resumed_tokens=len(self._journey.generated),
                kv_transfer_params=params,
                time_left_s=self._watch.time_left_s,
            )
            attempt.decode = await self._plane.open(attempt.placement.decode_address, request)
        except InvalidRequest as error:
            return self._journey.handle(LegRefused(error))
        except KvrouterError as error:
            return self._lost(attempt, _lost_leg(attempt.placement.decision.decode, error))
        if attempt.lost:
            return self._lost(attempt, attempt.lost[0])
        return []

    def _held(self) -> Attempt:
        if self._attempt is None:
            raise RuntimeError("the journey sends a leg before it was placed")
        return self._attempt

    def _first_token(self) -> None:
        if self.times.first_token_s is None:
            self.times.first_token_s = time.monotonic()
        attempt = self._held()
        if self._first_attempt is None:
            self._first_attempt = attempt
        if attempt.prefill_task is None or attempt.prefill_task.done():
            attempt.prefill = None  # its KV has been fetched: nothing waits there any more
        self._placer.first_token(attempt.placement)
        self._watch.enter(Phase.STREAMING)

    def _abandon(self, reason: str) -> None:
        """Cancel both legs and close the leases of the current attempt."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if attempt.prefill_task is not None and not attempt.prefill_task.done():
            attempt.prefill_task.cancel()
        if attempt.decode is not None:
            attempt.decode.cancel(reason)
        if attempt.prefill is not None:
            attempt.prefill.cancel(reason)
        self._placer.release(attempt.placement)

    def _too_long(self, kind: TooLong, silent_s: float) -> None:
        """A limit was reached: cancel the legs, and the read that meets their end tells why."""
        attempt = self._attempt
        if attempt is None:
            return
        if kind is TooLong.REQUEST:
            self.error = DeadlineExceeded(f"the request took longer than {self._patience.request_s:g} s")
        elif kind is TooLong.FIRST_TOKEN:
            self.error = DeadlineExceeded(f"no first token within {self._patience.first_token_s:g} s")
        else:
            self._silence = f"no token for {silent_s:.3g} s"
        for stream in (attempt.decode, attempt.prefill):
            if stream is not None:
                stream.cancel(self._silence or "the request's time is up")


def _lost_leg(pick: Pick, error: KvrouterError) -> LegLost:
    return LegLost(pick.leg, pick.rank.worker_id, error.message, full=isinstance(error, WorkerFull))
