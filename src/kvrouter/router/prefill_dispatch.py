"""Prefill dispatch: runs the prefill legs of requests whose decode leg another program sends."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
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
from kvrouter.core.requests import Bootstrap, GenerateRequest, KvTransferParams
from kvrouter.kernel.journey import Abandon, Command, Fail, NotPlaced, Place, SendDecode, SendPrefill
from kvrouter.kernel.placement.legs import prefill_leg
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.request_driver import Attempt, RequestDriver
from kvrouter.router.bookings import Bookings
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.leg_outcomes import lost_leg, prefill_outcome, read_prefill, with_intake_id
from kvrouter.router.model_router import ModelRouter
from kvrouter.transports.requests.port import EngineStream, RequestTransport

DISCARDED = "nobody will fetch its KV"

PREFILLS_MAX = 4096
"""The most prefill legs that run at a time; as many ended ones can still be freed."""


class PrefillsFull(Unavailable):
    """The maximum number of prefill legs is running."""

    code = "prefills_full"


class UnknownPrefill(NotFound):
    """No prefill leg of this request id is known."""

    code = "prefill_not_found"


class PrefillDiscarded(InvalidRequest):
    """The prefill was discarded before its answer."""

    status_hint = 409
    code = "prefill_discarded"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Where a request's KV is, or will be: ``bootstrap`` is the meeting place of a leg that still runs."""

    placement: Placement
    bootstrap: Bootstrap | None
    kv_transfer_params: KvTransferParams | None
    cached_tokens: int | None


class PrefillDispatch:
    """Runs prefill legs, one a request; a leg that fails before its answer is sent to another worker.

    A request id that is in use in ``bookings`` is refused. ``limit_s`` bounds a request from its arrival to
    the end of its leg.
    """

    def __init__(
        self,
        transport: RequestTransport,
        bookings: Bookings,
        instrumentation: ServiceInstrumentation,
        *,
        redispatches_max: int,
        limit_s: float,
        prefills_max: int = PREFILLS_MAX,
    ) -> None:
        self._transport = transport
        self._bookings = bookings
        self._instrumentation = instrumentation
        self._redispatches_max = redispatches_max
        self._limit_s = limit_s
        self._prefills_max = prefills_max
        self._running: dict[RequestId, _Run] = {}
        self._ended: OrderedDict[RequestId, EngineStream] = OrderedDict()
        """Ended legs whose KV may still wait for its decode worker, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._running)

    async def prefill(
        self,
        model: ModelRouter,
        request: GenerateRequest,
        placed: Callable[[Placement], None] = lambda _: None,
    ) -> Prefilled:
        """Pick a prefill worker, pass each placement to ``placed``, and send the leg. Returns when the KV is
        ready; in a bootstrap handoff, once the worker has accepted the leg, which continues.

        Raises :class:`ShuttingDown`, :class:`RoutingRefused`, :class:`RequestInUse`, :class:`PrefillsFull`,
        :class:`PrefillDiscarded`, :class:`WorkerFailed`, :class:`DeadlineExceeded`, the worker's refusal.
        Cancelling cancels the leg.
        """
        if self._is_closed:
            raise ShuttingDown("this router was closed: nothing more is prefilled")
        if len(self._running) >= self._prefills_max:
            raise PrefillsFull(f"{self._prefills_max} prefill legs run; wait for some")
        request_id = request.request_id
        self._bookings.claim(request_id)
        until_s = asyncio.get_running_loop().time() + self._limit_s
        run = self._running[request_id] = _Run(
            model,
            request,
            placed,
            self._transport,
            self._instrumentation,
            redispatches_max=self._redispatches_max,
            until_s=until_s,
        )
        self._idle.clear()
        try:
            async with asyncio.timeout_at(until_s):
                prefilled = await run.drive()
        except TimeoutError:
            run.driver.late(self._limit_s, time.monotonic())
            self._give_up(run, "the prefill was given up")
            raise DeadlineExceeded(f"the prefill took longer than {self._limit_s:g} s") from None
        except BaseException:
            self._give_up(run, "the prefill was given up")
            raise
        if prefilled.bootstrap is None:
            self._ended_well(run)
        else:
            task = asyncio.get_running_loop().create_task(self._run_on(run, until_s))
            self._tasks.add(task)
            task.add_done_callback(lambda ended: self._ran_on(request, ended))
        return prefilled

    def discard(self, request_id: RequestId) -> None:
        """Cancel the leg or free its KV: no decode worker will fetch it. Raises :class:`UnknownPrefill`."""
        run = self._running.get(request_id)
        if run is not None:
            run.discard()
        elif request_id in self._ended:
            self._ended.pop(request_id).cancel(DISCARDED)
        else:
            raise UnknownPrefill(f"request_id: no prefill of {request_id!r} is here", param="request_id")

    async def wait_idle(self, limit_s: float) -> int:
        """Wait until no leg runs, for at most ``limit_s`` seconds; return how many still run."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._running)

    async def close(self) -> None:
        """Cancel the running legs, and refuse new ones."""
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_on(self, run: "_Run", until_s: float) -> None:
        """Read a leg whose KV is fetched while it runs; the decode worker notices a failure itself."""
        try:
            async with asyncio.timeout_at(until_s):
                await run.read()
        except (KvrouterError, TimeoutError) as error:
            why = error.message if isinstance(error, KvrouterError) else f"longer than {self._limit_s:g} s"
            if not run.is_discarded:
                run.note_failure(error, self._limit_s)
            self._give_up(run, why)
            if not run.is_discarded:
                self._instrumentation.prefill_failed(run.request, run.worker_id, why)
        except BaseException:
            self._give_up(run, "this router shuts down")
            raise
        else:
            self._ended_well(run)

    def _ran_on(self, request: GenerateRequest, task: asyncio.Task[None]) -> None:
        """Log an internal error of the task, which no caller awaits."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._instrumentation.internal_error(request, task.exception())

    def _ended_well(self, run: "_Run") -> None:
        """Note that the leg ended: its load is gone and its KV waits for the decode worker."""
        request_id = run.request.request_id
        if run.stream is not None:
            self._ended[request_id] = run.stream
            self._ended.move_to_end(request_id)
            if len(self._ended) > self._prefills_max:
                self._ended.popitem(last=False)
        self._forget(request_id)

    def _give_up(self, run: "_Run", reason: str) -> None:
        """End the request without another attempt."""
        run.abandon(reason)
        run.driver.end(time.monotonic())
        self._forget(run.request.request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)
        self._bookings.give_back(request_id)
        if not self._running:
            self._idle.set()


class _Run:
    """One request's prefill: its current attempt and its outcome."""

    def __init__(
        self,
        model: ModelRouter,
        request: GenerateRequest,
        placed: Callable[[Placement], None],
        transport: RequestTransport,
        instrumentation: ServiceInstrumentation,
        *,
        redispatches_max: int,
        until_s: float,
    ) -> None:
        self.request = with_intake_id(request)
        self.driver: RequestDriver[Attempt] = RequestDriver(
            request.sampling, model.placer, redispatches_max=redispatches_max, prefill_alone=True
        )
        self.stream: EngineStream | None = None
        self.is_discarded = False
        """Whether :meth:`discard` was called."""
        self._model = model
        self._placed = placed
        self._transport = transport
        self._instrumentation = instrumentation
        self._until_s = until_s
        self._cached_tokens: int | None = None

    @property
    def worker_id(self) -> WorkerId:
        """The worker of the current or last attempt."""
        return self._placement.prefill_pick.rank.worker_id

    async def drive(self) -> Prefilled:
        """Carry out the journey's commands up to the decode leg, which another program sends."""
        todo = deque(self.driver.journey.begin())
        while True:
            command = todo.popleft()
            match command:
                case Place():
                    todo.extend(await self._place(command))
                case SendPrefill():
                    todo.extend(await self._send())
                case Abandon():
                    self.abandon(command.reason)
                case Fail():
                    raise command.error
                case SendDecode():
                    placement = self._placement
                    params = command.params if placement.bootstrap is None else None
                    return Prefilled(placement, placement.bootstrap, params, self._cached_tokens)
                case _:
                    raise RuntimeError(f"a prefill alone has no {type(command).__name__}")

    async def read(self) -> KvTransferParams | None:
        """Read the leg to its end and close its lease; return how its KV is fetched. Raises StreamBroken."""
        if self.stream is None:
            raise RuntimeError("a leg that was not sent was read")
        params = await read_prefill(self.stream, self._note_cached)
        self.driver.prefilled(self.driver.current_attempt, time.monotonic())
        self.driver.release(time.monotonic())
        return params

    def note_failure(self, error: KvrouterError | TimeoutError, limit_s: float) -> None:
        """Note that the leg failed while it ran on, or exceeded ``limit_s`` seconds."""
        driver, now_s = self.driver, time.monotonic()
        if isinstance(error, TimeoutError):
            driver.late(limit_s, now_s)
        else:
            lost = lost_leg(self._placement.prefill_pick, error, self.request.call)
            driver.blame(driver.current_attempt, lost, now_s)

    def discard(self) -> None:
        """Cancel the leg, now or once it is sent; it fails without a fault of its worker."""
        self.is_discarded = True
        if self.stream is not None:
            self.stream.cancel(DISCARDED)

    def abandon(self, reason: str) -> None:
        """Cancel the leg and close its lease; idempotent."""
        if self.stream is not None:
            self.stream.cancel(reason)
            self.stream = None
        if self.driver.attempt is not None:
            self.driver.release(time.monotonic())

    def _note_cached(self, cached_tokens: int, prompt_tokens: int | None) -> None:
        self._cached_tokens = cached_tokens
        self._model.note_cached_tokens(self._placement, cached_tokens, prompt_tokens)

    async def _place(self, command: Place) -> Sequence[Command]:
        request, driver = self.request, self.driver
        try:
            placement = await self._model.place(
                request, request.token_ids, attempt=command.attempt, excluded=command.excluded
            )
        except (RoutingRefused, InvalidRequest) as error:
            return driver.journey.handle(NotPlaced(error))
        self._placed(placement)
        if driver.last_loss is not None:
            self._instrumentation.sent_again(request, driver.last_loss, streaming=False)
        return driver.placed(Attempt(placement))

    async def _send(self) -> Sequence[Command]:
        """Send the leg; in a bootstrap handoff it counts as done once the worker has accepted it."""
        attempt = self.driver.current_attempt
        outcome = await prefill_outcome(attempt.placement, self._run(attempt), self.request.call)
        if self.is_discarded:
            raise PrefillDiscarded("request_id: the prefill was discarded", param="request_id")
        return self.driver.prefill_ended(attempt, outcome, time.monotonic())

    async def _run(self, attempt: Attempt) -> KvTransferParams | None:
        placement = attempt.placement
        time_left_s = max(0.0, self._until_s - asyncio.get_running_loop().time())
        leg = prefill_leg(self.request, placement, time_left_s=time_left_s)
        attempt.prefill_sent_s = time.monotonic()
        stream = self.stream = await self._transport.open(placement.decode_address, leg)
        if self.is_discarded:
            stream.cancel(DISCARDED)
        if placement.bootstrap is None:
            return await self.read()
        await stream.accepted()
        attempt.prefill_runs_in_parallel = True
        return {}

    @property
    def _placement(self) -> Placement:
        if self.driver.placement is None:
            raise RuntimeError("the journey sends a leg before it was placed")
        return self.driver.placement
