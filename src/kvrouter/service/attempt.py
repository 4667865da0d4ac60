"""One attempt of a request: its legs as engines receive them, timeouts, output, fault attribution."""

import asyncio
import dataclasses
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from msgspec.structs import replace

from kvrouter.core.errors import DeadlineExceeded, InvalidRequest, KvrouterError, Unavailable
from kvrouter.core.requests import (
    EngineRequest,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Leg,
)
from kvrouter.fleet import Fault, Suspicion
from kvrouter.journey import Journey, LegLost, LegRefused, PrefillDone, State
from kvrouter.placement.placement import Placement
from kvrouter.routing.request import Pick
from kvrouter.service.model_router import ModelRouter
from kvrouter.service.traffic import AttemptTrail
from kvrouter.transports.requests.port import (
    EngineFailed,
    EngineStream,
    LegRepeated,
    ReaderTooSlow,
    RequestPlane,
    StreamBroken,
    TokenSink,
    WorkerDeclined,
    WorkerFull,
)

INTAKE_BYTES = 8


def with_intake_id(request: GenerateRequest) -> GenerateRequest:
    """Return ``request`` with a name of its own: whatever ids clients give, its legs are no other's."""
    return replace(request, intake=secrets.token_hex(INTAKE_BYTES))


OnCached = Callable[[int, int | None], None]
"""Hears how many prompt tokens the engine had cached, and how many it counts, where it reports that."""


async def read_prefill(stream: EngineStream, on_cached: OnCached) -> KvTransferParams | None:
    """Read a prefill leg to its end; return what it says about where its KV waits.

    Raises StreamBroken.
    """
    params: KvTransferParams | None = None
    async for chunk in stream:
        if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.CANCELLED:
            raise StreamBroken(chunk.error or "the engine cancelled the prefill")
        if chunk.cached_tokens is not None:
            on_cached(chunk.cached_tokens, chunk.prompt_tokens)
        if chunk.kv_transfer_params is not None:
            params = chunk.kv_transfer_params
        if chunk.finish is not None:
            return params
    raise StreamBroken("the stream ended without a last chunk")


async def open_decode(plane: RequestPlane, address: str, request: EngineRequest) -> EngineStream:
    """Open a decode leg. One whose KV waits at a prefill worker is opened also for a caller that is cancelled
    meanwhile, and is then cancelled: often only its worker can notify the prefill worker that nobody
    comes.

    Raises what the plane's ``open`` raises.
    """
    if not request.kv_transfer_params:
        return await plane.open(address, request)
    opening = asyncio.get_running_loop().create_task(_opened(plane, address, request))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_take_back)
        raise


async def _opened(plane: RequestPlane, address: str, request: EngineRequest) -> EngineStream:
    return await plane.open(address, request)


def _take_back(opening: "asyncio.Task[EngineStream]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().cancel("its client left while it was sent")


def lost_leg(pick: Pick, error: KvrouterError) -> LegLost:
    """Return what an error that a worker gave for a leg means to the request's journey."""
    return LegLost(
        pick.leg,
        pick.rank.worker_id,
        error.message,
        answer=error.answer,
        full=isinstance(error, WorkerFull),
        repeated=isinstance(error, LegRepeated),
        blameless=isinstance(error, Unavailable | DeadlineExceeded | ReaderTooSlow | WorkerDeclined),
        taken=isinstance(error, StreamBroken | EngineFailed),
    )


async def prefill_outcome(
    placement: Placement, leg: Awaitable[KvTransferParams | None]
) -> PrefillDone | LegLost | LegRefused:
    """Await a prefill leg; return what its journey hears of it. Clients may read why a leg was lost."""
    pick = placement.prefill_pick
    try:
        params = await leg
    except InvalidRequest as error:
        return LegRefused(error)
    except KvrouterError as error:
        lost = lost_leg(pick, error)
        return dataclasses.replace(lost, why=placement.without_addresses(lost.why))
    return PrefillDone(pick.rank.worker_id, params)


@dataclass(slots=True)
class Attempt(AttemptTrail):
    """What one attempt holds; all of it is given back when the attempt is abandoned."""

    prefill: EngineStream | None = None
    prefill_task: asyncio.Task[None] | None = None
    decode: EngineStream | None = None
    lost: list[LegLost] = field(default_factory=list)
    refused: InvalidRequest | None = None
    """What the prefill engine of a bootstrap handoff says of the call, which both engines are given."""

    def sent_s(self, leg: Leg) -> float:
        """When ``leg`` was sent, on the monotonic clock."""
        return self.prefill_sent_s if leg is Leg.PREFILL else self.last_sent_s


LATE_S = 0.1
"""A check that comes so much too late shows that this process stood still, not that a worker is silent."""


class TooLong(Enum):
    """What took too long."""

    REQUEST = auto()
    """The request as a whole."""
    PREFILL = auto()
    """The prefill leg of a pair, before the one that answers."""
    FIRST_TOKEN = auto()
    """The client's first token."""
    SILENCE = auto()
    """A worker that should go on with an answer: another one may."""


class Phase(Enum):
    """What is waited for."""

    FIRST_TOKEN = auto()
    PREFILLING = auto()
    """The same, and the prefill leg of a pair goes before the one that answers."""
    RESUMING = auto()
    """The client has tokens, and another worker prefills to go on."""
    STREAMING = auto()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request may take to the end of its prefill leg, to its first token and to its end, and how
    long its stream may be silent before the worker counts as lost; in seconds.
    """

    prefill_s: float
    first_token_s: float
    between_tokens_s: float
    request_s: float


class StallWatch:
    """Calls ``on_too_long`` once each time a limit is reached. All moments are on the monotonic clock.

    Time that the client takes to read counts for no worker: it begins with :meth:`pause` and ends with
    :meth:`resume`. Neither does time in which this process stood still: what came meanwhile waits to be read.
    """

    __slots__ = (
        "_began_s",
        "_check_s",
        "_loop",
        "_on_too_long",
        "_paused_s",
        "_timeouts",
        "_timer",
        "heard_s",
        "phase",
    )

    def __init__(self, timeouts: Timeouts, on_too_long: Callable[[TooLong, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = self._check_s = self.heard_s = time.monotonic()
        self._paused_s: float | None = None
        """Since when the client has what came; None while a worker is waited for."""
        self.phase = Phase.FIRST_TOKEN

    @property
    def time_left_s(self) -> float:
        """How long the request may still take, in seconds."""
        return max(0.0, self._began_s + self._timeouts.request_s - time.monotonic())

    def enter(self, phase: Phase) -> None:
        """From now on this is waited for."""
        self.phase = phase
        self.heard_s = time.monotonic()
        self._paused_s = self.heard_s if phase is Phase.STREAMING else None
        self._arm()

    def pause(self) -> None:
        """The client has what came."""
        self._paused_s = time.monotonic()

    def resume(self, *, heard: bool) -> None:
        """A worker is waited for. ``heard``: what came last was a sign that it is at work."""
        now_s = time.monotonic()
        self._leave_out_client(now_s)
        self._paused_s = None
        if heard:
            self.heard_s = now_s

    def _leave_out_client(self, now_s: float) -> None:
        if self._paused_s is not None:
            self.heard_s += now_s - self._paused_s
            self._paused_s = now_s

    def stop(self) -> None:
        """Watch no longer, and drop the callback: what a request held goes with its last user."""
        self._disarm()
        self._on_too_long = _no_callback

    def _due(self) -> tuple[float, TooLong]:
        """When the next limit is reached, and which one it is."""
        timeouts = self._timeouts
        end_s = self._began_s + timeouts.request_s
        if self.phase is Phase.PREFILLING:
            limit_s, kind = self._began_s + timeouts.prefill_s, TooLong.PREFILL
        elif self.phase is Phase.FIRST_TOKEN:
            limit_s, kind = self._began_s + timeouts.first_token_s, TooLong.FIRST_TOKEN
        elif self.phase is Phase.RESUMING:
            limit_s, kind = self.heard_s + timeouts.first_token_s, TooLong.SILENCE
        else:
            limit_s, kind = self.heard_s + timeouts.between_tokens_s, TooLong.SILENCE
        return (end_s, TooLong.REQUEST) if end_s <= limit_s else (limit_s, kind)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        now_s = time.monotonic()
        wait_s = max(0.0, self._due()[0] - now_s)
        self._check_s = now_s + wait_s
        self._timer = self._loop.call_later(wait_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        self._leave_out_client(now_s)
        due_s, kind = self._due()
        late_s = now_s - self._check_s
        if kind is TooLong.SILENCE and late_s > LATE_S:
            # as long as this process stood still, and as long again to read what came meanwhile
            self.heard_s = min(now_s, self.heard_s + 2.0 * late_s)
            due_s, kind = self._due()
        if now_s < due_s:
            self._arm()
        else:
            self._on_too_long(kind, now_s - self.heard_s)


def _no_callback(_kind: TooLong, _silent_s: float) -> None:
    """Whose watch it was has ended."""


class Output:
    """Notes what is generated, over all attempts of a request. What it does for a token is done for every
    token of every answer.
    """

    def __init__(self, journey: Journey, model: ModelRouter, watch: StallWatch) -> None:
        self.gaps_s = array("d")
        """Seconds between two arrivals of tokens: 8 bytes each, however long the answer is."""
        self._journey = journey
        self._model = model
        self._watch = watch
        self._placement: Placement | None = None
        self._token_s = 0.0
        self._tail_tokens = 0

    def begin(self, placement: Placement) -> None:
        """Another attempt: its prompt's partial block is filled on."""
        self._placement = placement
        self._tail_tokens = placement.prompt.isl_tokens % placement.block_size

    def first(self, token_ids: Sequence[int]) -> None:
        """An attempt's first tokens came: nobody waited for them since the last ones."""
        self._token_s = self._watch.heard_s = time.monotonic()
        self._count(token_ids)

    def more(self, token_ids: Sequence[int]) -> None:
        """More tokens came."""
        now_s = self._watch.heard_s = time.monotonic()
        self.gaps_s.append(now_s - self._token_s)
        self._token_s = now_s
        self._count(token_ids)

    def noting(self, sink: TokenSink) -> TokenSink:
        """Return a sink that notes tokens as :meth:`more` does, and hands them to ``sink``."""
        placement = self._held()
        watch, block_size = self._watch, placement.block_size
        note_gap_s, note_tokens, clock_s = self.gaps_s.append, self._journey.tokens, time.monotonic

        def take(token_ids: Sequence[int]) -> bool:
            now_s = watch.heard_s = clock_s()
            note_gap_s(now_s - self._token_s)
            self._token_s = now_s
            note_tokens(token_ids)
            self._tail_tokens += len(token_ids)
            if self._tail_tokens >= block_size:
                self._count_blocks(placement)
            return sink(token_ids)

        return take

    def _count(self, token_ids: Sequence[int]) -> None:
        placement = self._held()
        self._journey.tokens(token_ids)
        self._tail_tokens += len(token_ids)
        if self._tail_tokens >= placement.block_size:
            self._count_blocks(placement)

    def _count_blocks(self, placement: Placement) -> None:
        """Notify the ledger of each block of output that became full."""
        blocks, self._tail_tokens = divmod(self._tail_tokens, placement.block_size)
        self._model.output_blocks(placement, blocks)

    def _held(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("tokens came before the request was placed")
        return self._placement


SILENT_SHARE = 0.5
"""Who had a request for this part of its deadline, and brought nothing, is silent; else it came too late."""


def attribute_loss(
    model: ModelRouter, attempt: Attempt, lost: LegLost, state: State, failed_legs: "FailedLegs"
) -> None:
    """A leg was lost. That a worker is full, had the leg already or is leaving is no failure of its own."""
    if lost.full or lost.repeated or lost.blameless:
        return
    has_begun = lost.leg is not Leg.PREFILL and state is State.STREAMING
    if lost.taken and not has_begun and not model.leg_suspected(attempt.placement, lost.leg):
        failed_legs.add(attempt, lost.leg)
        return
    since_s = attempt.sent_s(lost.leg)
    model.leg_failed(attempt.placement, lost.leg, Fault.LOST, since_s=since_s, has_begun=has_begun)


@dataclass(frozen=True, slots=True)
class _FailedLeg:
    """A leg that a worker failed at ``failed_s``, on the monotonic clock."""

    attempt: Attempt
    leg: Leg
    failed_s: float


class FailedLegs:
    """The legs of one request that workers had when they failed, before they brought anything.

    Whose fault that is shows when others are given the same: the request's where they fail too, so that no
    request can set aside engines that serve others; the workers' that failed where another one does it.
    """

    def __init__(self, model: ModelRouter) -> None:
        self._model = model
        self._prefill: list[_FailedLeg] = []
        self._last: list[_FailedLeg] = []
        self._kv_lost: list[Attempt] = []

    def add(self, attempt: Attempt, leg: Leg) -> None:
        """A worker failed a leg that it had."""
        failed = self._prefill if leg is Leg.PREFILL else self._last
        failed.append(_FailedLeg(attempt, leg, time.monotonic()))

    def add_kv_lost(self, attempt: Attempt) -> None:
        """A decode worker failed a leg that fetches KV, and did not say why."""
        self._kv_lost.append(attempt)

    def prefilled(self) -> None:
        """A worker prefilled the request: those that failed to are at fault."""
        self._blame(self._prefill, Suspicion.SURE)

    def begun(self) -> None:
        """A worker answers: those that failed to are at fault. Prefill legs that failed were left out."""
        self._blame(self._last, Suspicion.SURE)
        for attempt in self._kv_lost:
            self._model.kv_lost(attempt.placement, since_s=attempt.last_sent_s)
        self.end()

    def end(self) -> None:
        """No other worker is given the request. Idempotent."""
        is_shared = len(self._prefill) + len(self._last) + len(self._kv_lost) > 1
        for failed in (self._prefill, self._last):
            self._blame(failed, Suspicion.SHARED if is_shared else Suspicion.ALONE)
        self._kv_lost.clear()

    def _blame(self, failed: list[_FailedLeg], suspicion: Suspicion) -> None:
        for each in failed:
            self._model.leg_failed(
                each.attempt.placement,
                each.leg,
                Fault.LOST,
                since_s=each.attempt.sent_s(each.leg),
                failed_s=each.failed_s,
                suspicion=suspicion,
            )
        failed.clear()


def attribute_silence(
    model: ModelRouter, attempt: Attempt, state: State, *, heard_s: float, before_s: float = inf
) -> None:
    """Nothing came in time, of legs that were sent ``before_s``. Of a pair whose legs both still run, either
    may be what is waited for; the one that is well will show it with another request.
    """
    placement, task = attempt.placement, attempt.prefill_task
    waits_for_prefill = state is State.DECODING and task is not None and not task.done()
    if (state is State.PREFILLING or waits_for_prefill) and attempt.prefill_sent_s < before_s:
        model.leg_failed(placement, Leg.PREFILL, Fault.SILENT, since_s=attempt.prefill_sent_s)
    leg = placement.decision.decode.leg
    if state is State.DECODING and attempt.last_sent_s < before_s:
        model.leg_failed(placement, leg, Fault.SILENT, since_s=attempt.last_sent_s)
    elif state is State.STREAMING:
        model.leg_failed(placement, leg, Fault.SILENT, since_s=heard_s, has_begun=True)
