"""Prefill legs whose decode leg another program sends: picked, sent, answered with the KV's location."""

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from kvrouter.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvrouterError,
    NotFound,
    RoutingRefused,
    ShuttingDown,
    Unavailable,
)
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.core.requests import Bootstrap, EngineRequest, GenerateRequest, KvTransferParams, Leg
from kvrouter.fleet import Fault
from kvrouter.journey import (
    Abandon,
    Fail,
    Journey,
    LegLost,
    LegRefused,
    NotPlaced,
    Place,
    Placed,
    PrefillDone,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.placement.placement import Placement
from kvrouter.placement.placer import prefill_leg
from kvrouter.service.attempt import (
    SILENT_SHARE,
    Attempt,
    FailedLegs,
    attribute_loss,
    lost_leg,
    prefill_outcome,
    read_prefill,
    with_intake_id,
)
from kvrouter.service.bookings import Bookings
from kvrouter.service.instrumentation import ServiceInstrumentation
from kvrouter.service.model_router import ModelRouter
from kvrouter.transports.requests.port import EngineStream, RequestPlane

PREFILLS_MAX = 4096
"""How many prefill legs may run at a time; as many that have ended can still be freed."""


class PrefillsFull(Unavailable):
    """As many prefill legs run as may."""

    code = "prefills_full"


class UnknownPrefill(NotFound):
    """No prefill of this request id is known here."""

    code = "prefill_not_found"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Where a request's KV is, or will be: ``bootstrap`` is the meeting place of a leg that still runs."""

    placement: Placement
    bootstrap: Bootstrap | None
    kv_transfer_params: KvTransferParams | None
    cached_tokens: int | None


class PrefillDispatch:
    """Runs prefill legs, one a request; a worker that fails before its answer costs another try.

    Request ids are those of ``bookings``: one that is in use there is refused. ``limit_s`` bounds a request
    from its arrival to the end of its leg.
    """

    def __init__(
        self,
        plane: RequestPlane,
        bookings: Bookings,
        observed: ServiceInstrumentation,
        *,
        redispatches_max: int,
        limit_s: float,
        prefills_max: int = PREFILLS_MAX,
    ) -> None:
        self._plane = plane
        self._bookings = bookings
        self._observed = observed
        self._redispatches_max = redispatches_max
        self._limit_s = limit_s
        self._prefills_max = prefills_max
        self._running: dict[RequestId, _Run] = {}
        self._ended: OrderedDict[RequestId, EngineStream] = OrderedDict()
        """Legs whose KV may still wait for its decode worker; the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._running)

    async def prefill(self, model: ModelRouter, request: GenerateRequest) -> Prefilled:
        """Pick a prefill worker and send it the leg; return when its KV waits, or, where KV is handed on at a
        meeting place, as soon as the worker has accepted the leg, which then runs on.

        Raises :class:`RoutingRefused`, :class:`RequestInUse`, :class:`PrefillsFull`, :class:`WorkerFailed`,
        :class:`DeadlineExceeded`, and what the worker refuses the leg for. Cancelling it cancels the leg.
        """
        if self._is_closed:
            raise ShuttingDown("this router was closed: nothing more is prefilled")
        if len(self._running) >= self._prefills_max:
            raise PrefillsFull(f"{self._prefills_max} prefill legs run; wait for some")
        request_id = request.request_id
        self._bookings.claim(request_id)
        until_s = asyncio.get_running_loop().time() + self._limit_s
        run = self._running[request_id] = _Run(model, request, self._plane, self._observed, until_s=until_s)
        self._idle.clear()
        try:
            async with asyncio.timeout_at(until_s):
                prefilled = await run.drive(
                    Journey(request.sampling, redispatches_max=self._redispatches_max, prefill_alone=True)
                )
        except TimeoutError:
            run.note_silence(self._limit_s)
            self._forget(request_id)
            raise DeadlineExceeded(f"the prefill took longer than {self._limit_s:g} s") from None
        except BaseException:
            self._forget(request_id)
            raise
        if prefilled.bootstrap is None:
            self._ended_well(run)
        else:
            task = asyncio.get_running_loop().create_task(self._run_on(run, until_s))
            self._tasks.add(task)
            task.add_done_callback(lambda ended: self._ran_on(request, ended))
        return prefilled

    def let_go(self, request_id: RequestId) -> None:
        """Nobody will fetch the KV: cancel the leg, or free what waits. Raises :class:`UnknownPrefill`."""
        run = self._running.get(request_id)
        stream = self._ended.pop(request_id, None) if run is None else run.stream
        if stream is None:
            raise UnknownPrefill(f"request_id: no prefill of {request_id!r} is here", param="request_id")
        if run is not None:
            run.is_let_go = True
        stream.cancel("nobody will fetch its KV")

    async def wait_idle(self, limit_s: float) -> int:
        """Wait until no leg runs, or ``limit_s`` seconds; return how many still do."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._running)

    async def close(self) -> None:
        """Cancel the legs that run on, and take no more."""
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_on(self, run: "_Run", until_s: float) -> None:
        """Read a leg whose KV is fetched while it runs; decode meets its failure by itself."""
        try:
            async with asyncio.timeout_at(until_s):
                await run.read()
        except (KvrouterError, TimeoutError) as error:
            why = error.message if isinstance(error, KvrouterError) else f"longer than {self._limit_s:g} s"
            if not run.is_let_go:
                run.note_failure(error, self._limit_s)
            run.abandon(why)
            if not run.is_let_go:
                self._observed.prefill_failed(run.request, run.worker_id, why)
            self._forget(run.request.request_id)
        except BaseException:
            run.abandon("this router shuts down")
            self._forget(run.request.request_id)
            raise
        else:
            self._ended_well(run)

    def _ran_on(self, request: GenerateRequest, task: asyncio.Task[None]) -> None:
        """Nobody awaits the task: a mistake of ours in it must not vanish."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._observed.mistake(request, task.exception())

    def _ended_well(self, run: "_Run") -> None:
        """The leg is done: its load is gone, and its KV waits."""
        request_id = run.request.request_id
        if run.stream is not None:
            self._ended[request_id] = run.stream
            self._ended.move_to_end(request_id)
            if len(self._ended) > self._prefills_max:
                self._ended.popitem(last=False)
        self._forget(request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)
        self._bookings.give_back(request_id)
        if not self._running:
            self._idle.set()


class _Run:
    """One request's prefill: its current try, and what came of it."""

    def __init__(
        self,
        model: ModelRouter,
        request: GenerateRequest,
        plane: RequestPlane,
        observed: ServiceInstrumentation,
        *,
        until_s: float,
    ) -> None:
        self.request = with_intake_id(request)
        self.stream: EngineStream | None = None
        self.is_let_go = False
        """Whether its owner said that nobody will fetch its KV."""
        self._model = model
        self._plane = plane
        self._observed = observed
        self._until_s = until_s
        self._placement: Placement | None = None
        self._lost: LegLost | None = None
        self._params: KvTransferParams | None = None
        self._cached_tokens: int | None = None
        self._sent_s = 0.0
        self._failed_legs = FailedLegs(model)

    @property
    def worker_id(self) -> WorkerId:
        """The worker of the current try."""
        return self._placed().prefill_pick.rank.worker_id

    async def drive(self, journey: Journey) -> Prefilled:
        """Do what the journey says, up to its decode leg, which is somebody else's."""
        commands = deque(journey.begin())
        try:
            while True:
                command = commands.popleft()
                match command:
                    case Place():
                        commands.extend(journey.handle(await self._place(command)))
                    case SendPrefill():
                        commands.extend(journey.handle(await self._send()))
                    case Abandon():
                        self.abandon(command.reason)
                    case Fail():
                        raise command.error
                    case SendDecode():
                        placement = self._placed()
                        return Prefilled(placement, placement.bootstrap, self._params, self._cached_tokens)
                    case _:
                        raise RuntimeError(f"a prefill alone has no {type(command).__name__}")
        except BaseException:
            self.abandon("the prefill was given up")
            self._failed_legs.end()
            raise

    async def read(self) -> None:
        """Read the leg to its end, and close its lease. Raises :class:`StreamBroken`."""
        placement = self._placed()
        if self.stream is None:
            raise RuntimeError("a leg that was not sent was read")
        self._params = await read_prefill(self.stream, self._note_cached)
        self._model.prefill_done(placement)
        self._failed_legs.prefilled()
        self._model.release(placement)

    def note_failure(self, error: KvrouterError | TimeoutError, limit_s: float) -> None:
        """The leg failed while it ran on."""
        if isinstance(error, TimeoutError):
            self.note_silence(limit_s)
        else:
            self._attribute_fault(lost_leg(self._placed().prefill_pick, error))
        self._failed_legs.end()

    def note_silence(self, limit_s: float) -> None:
        """The leg was not done in time: a worker that had a good part of ``limit_s`` seconds is silent."""
        if self._placement is not None and self._sent_s < time.monotonic() - SILENT_SHARE * limit_s:
            self._model.leg_failed(self._placement, Leg.PREFILL, Fault.SILENT, since_s=self._sent_s)

    def _attribute_fault(self, lost: LegLost) -> None:
        attempt = Attempt(self._placed(), prefill_sent_s=self._sent_s)
        attribute_loss(self._model, attempt, lost, State.PREFILLING, self._failed_legs)

    def _note_cached(self, cached_tokens: int, prompt_tokens: int | None) -> None:
        self._cached_tokens = cached_tokens
        self._model.note_cached_tokens(self._placed(), cached_tokens, prompt_tokens)

    def abandon(self, reason: str) -> None:
        """Cancel the leg and give back what was booked; idempotent."""
        if self.stream is not None:
            self.stream.cancel(reason)
            self.stream = None
        if self._placement is not None:
            self._model.release(self._placement)

    async def _place(self, command: Place) -> Placed | NotPlaced:
        request = self.request
        self._placement = None  # while it waits for a worker nobody has it
        try:
            self._placement = await self._model.place(
                request, request.token_ids, attempt=command.attempt, excluded=command.excluded
            )
        except (RoutingRefused, InvalidRequest) as error:
            return NotPlaced(error)
        if self._lost is not None:
            self._observed.sent_again(request, self._lost, streaming=False)
        return Placed(Shape.SYNCHRONOUS)

    async def _send(self) -> PrefillDone | LegLost | LegRefused:
        """Send the leg; one with a meeting place is done, as far as its client goes, once it is accepted."""
        placement = self._placed()
        time_left_s = max(0.0, self._until_s - asyncio.get_running_loop().time())
        engine_request = prefill_leg(self.request, placement, resumed_tokens=0, time_left_s=time_left_s)
        outcome = await prefill_outcome(placement, self._run(placement, engine_request))
        if isinstance(outcome, LegLost):
            self._lost = outcome
            self._attribute_fault(outcome)
        return outcome

    async def _run(self, placement: Placement, engine_request: EngineRequest) -> KvTransferParams | None:
        self._sent_s = time.monotonic()
        self.stream = await self._plane.open(placement.decode_address, engine_request)
        if placement.bootstrap is not None:
            return {}
        await self.read()
        return self._params

    def _placed(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("the journey sends a leg before it was placed")
        return self._placement
