"""Legs at a worker, over any transport: which run, which are repeated, how each ends."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import EngineChunk, EngineRequest, Leg
from kvrouter.transports.background import spawn
from kvrouter.transports.requests.encoding import credit_of
from kvrouter.transports.requests.port import (
    EngineStream,
    LegRepeated,
    RequestServer,
    StreamBroken,
    WorkerFull,
    WorkerUnreachable,
)
from kvrouter.transports.requests.session import LEFT
from kvrouter.transports.requests.worker_session import Answer, WorkerSession

LEGS_MAX = 16_384
"""How many legs one worker runs at once; a further one is refused as WorkerFull."""

ENDED_MAX = 8192
"""How many ended legs are remembered, so that a request that arrives twice is not served twice: at a thousand
legs a second, longer than any router waits for an acknowledgement.
"""

PREFILLED_MAX = 4096
"""How many ended prefill legs can still be cancelled; older ones are freed by the engine's own timeout."""

CONNECTION_CLOSED = "the router closed its connection"


class LegKey(msgspec.Struct, frozen=True):
    """Identifies a leg, to serve it at most once."""

    request_id: RequestId
    intake: str
    attempt: int
    leg: Leg


def key_of(request: EngineRequest) -> LegKey:
    """Return the key of a request's leg."""
    return LegKey(request.request_id, request.intake, request.attempt, request.leg)


class LegName(msgspec.Struct, frozen=True):
    """A router's name for one leg, unique for the life of the router."""

    router: str
    number: int


class RouterGone(Exception):
    """The router that reads a leg's answer is gone."""


class LegWriter(Protocol):
    """Sends one leg's answer over a transport. All methods but ``end`` raise :class:`RouterGone` when the
    router is gone, and may raise ProtocolError for a chunk that cannot be encoded.
    """

    async def accept(self) -> None:
        """Report that the worker accepted the leg."""

    def take(self, chunk: EngineChunk) -> bool:
        """Send ``chunk``, which is not the last, and return True; return False if that has to be awaited."""

    async def send(self, chunk: EngineChunk) -> None:
        """Send ``chunk``, which is not the last, once there is room."""

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send the last chunk once there is room. ``over`` is called just before the router can see it."""

    async def end(self, error: Exception) -> None:
        """Send that the leg was refused or, once accepted, lost. Raises nothing."""


class RunningLegs:
    """The running and recently ended legs of one worker: each is served once."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._running: set[LegKey] = set()
        self._ended: OrderedDict[LegKey, None] = OrderedDict()
        self._idle: asyncio.Event | None = None
        """Set once no leg runs; None while nobody waits for that."""

    async def served(self) -> None:
        """Return once routers can reach the worker: at once, unless a subclass waits."""

    @property
    def running_legs(self) -> int:
        """The number of running legs: from the request to the last chunk, a failure or a cancellation."""
        return len(self._running)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, at most ``limit_s`` seconds; return whether that is so."""
        if self._running:
            if self._idle is None:
                self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(limit_s):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return True

    def _begin(self, key: LegKey) -> None:
        """Add a leg. Raises LegRepeated for one that runs or ran here, WorkerFull at :data:`LEGS_MAX`."""
        if key in self._running or key in self._ended:
            when = "runs here already" if key in self._running else "ran here before"
            raise LegRepeated(f"{key.request_id}#{key.attempt}: this {key.leg} leg {when}")
        if len(self._running) >= LEGS_MAX:
            raise WorkerFull(f"{self.address}: {LEGS_MAX} legs run")
        self._running.add(key)

    def _over(self, key: LegKey) -> None:
        """Move a leg to the ended ones, also one that never reached its engine. Idempotent."""
        if key not in self._running:
            return
        self._running.discard(key)
        self._ended[key] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        if self._idle is not None and not self._running:
            self._idle.set()
            self._idle = None


class _ServedLeg:
    """One leg from its request to its end, and the task that serves it."""

    def __init__(self, name: LegName, key: LegKey) -> None:
        self.name = name
        self.key = key
        self.inner: EngineStream | None = None
        self.broken: str | None = None
        self.task = asyncio.current_task()

    def cancel(self, reason: str) -> None:
        if self.inner is not None:
            _cancel_soon(self.inner, reason)

    def end_task(self) -> None:
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def lost(self, why: str) -> KvrouterError:
        """Return the error for the router when the request is not at fault."""
        return WorkerUnreachable(why) if self.inner is None else StreamBroken(why)


class LegServer(RunningLegs):
    """The registration of one worker at a request transport: its server, and the legs that run there.

    ``on_leave`` is called with the reason when the worker leaves. ``clock`` measures a router's silence.
    """

    def __init__(
        self, address: str, server: RequestServer, clock: AwakeClock, on_leave: Callable[[str], None]
    ) -> None:
        super().__init__(address)
        self._server = server
        self._on_leave = on_leave
        self._clock = clock
        self._legs: dict[LegName, _ServedLeg] = {}
        self._prefilled: OrderedDict[LegName, EngineStream] = OrderedDict()
        self._alive_s: dict[str, float] = {}
        self._left: str | None = None

    def leave(self, why: str) -> None:
        """Break open streams and refuse new ones. Idempotent."""
        if self._left is not None:
            return
        self._left = f"{self.address}: {why}"
        self._on_leave(why)
        for leg in tuple(self._legs.values()):
            leg.broken = self._left
            leg.cancel(why)
            leg.end_task()

    async def run(self, name: LegName, request: EngineRequest, answer: LegWriter) -> None:
        """Serve one leg to its end, in the calling task. Raises CancelledError when the leg was cancelled."""
        leg = _ServedLeg(name, key_of(request))
        try:
            self._admit(leg)
            leg.inner = await self._server.submit(request)
            await answer.accept()
            await self._answer(leg, leg.inner, answer)
        except asyncio.CancelledError:
            if leg.broken is None:
                self._stop(leg, CONNECTION_CLOSED)
                raise
            if leg.task is not None:
                leg.task.uncancel()
            await answer.end(leg.lost(leg.broken))
        except RouterGone:
            self._stop(leg, CONNECTION_CLOSED)
        except KvrouterError as error:
            leg.cancel("its answer was lost")
            await answer.end(error)
        except Exception as error:  # noqa: BLE001 - an error of an engine ends its leg, not its worker
            leg.cancel("its answer was lost")
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"leg {request.engine_key} failed", "exception": error}
            )
            await answer.end(StreamBroken(f"the worker failed: {type(error).__name__}: {error}"))
        finally:
            self._forget(leg)

    def cancel(self, name: LegName, reason: str) -> None:
        """Cancel a leg, or free the KV of an ended prefill leg. Idempotent."""
        leg = self._legs.get(name)
        if leg is not None:
            self._stop(leg, reason)
        prefilled = self._prefilled.pop(name, None)
        if prefilled is not None:
            _cancel_soon(prefilled, reason)

    def drop_router(self, router: str, why: str) -> None:
        """Cancel the legs of a router that is gone, and free the KV that they prefilled."""
        self._alive_s.pop(router, None)
        for name in [name for name in (*self._legs, *self._prefilled) if name.router == router]:
            self.cancel(name, why)

    def mark_alive(self, router: str) -> None:
        """Record that a router is alive."""
        if router in self._alive_s:
            self._alive_s[router] = self._clock.now_s

    def cancel_silent(self, dead_after_s: float) -> None:
        """Drop every router that was silent for ``dead_after_s``."""
        now_s = self._clock.now_s
        for router in [router for router, at_s in self._alive_s.items() if now_s - at_s > dead_after_s]:
            self.drop_router(router, f"the router was not heard for {dead_after_s} s")

    def _admit(self, leg: _ServedLeg) -> None:
        if self._left is not None:
            raise WorkerUnreachable(self._left)
        if leg.name in self._legs:
            raise LegRepeated(f"leg {leg.name.number} of this router runs here already")
        self._begin(leg.key)
        self._legs[leg.name] = leg
        self._alive_s[leg.name.router] = self._clock.now_s

    async def _answer(self, leg: _ServedLeg, inner: EngineStream, answer: LegWriter) -> None:
        take = answer.take
        async for chunk in inner:
            if chunk.finish is not None:
                await answer.send_last(chunk, partial(self._ended_well, leg, inner))
                return
            if not take(chunk):
                await answer.send(chunk)
        raise StreamBroken(f"{self.address}: the engine ended a leg without a last chunk")

    def _ended_well(self, leg: _ServedLeg, inner: EngineStream) -> None:
        self._forget(leg)
        if leg.key.leg is Leg.PREFILL:
            self._prefilled[leg.name] = inner
            if len(self._prefilled) > PREFILLED_MAX:
                self._prefilled.popitem(last=False)

    def _stop(self, leg: _ServedLeg, reason: str) -> None:
        """Cancel the leg in the engine, unless it has ended, and end its task."""
        if self._legs.get(leg.name) is leg:
            self._forget(leg)
            leg.cancel(reason)
            leg.end_task()

    def _forget(self, leg: _ServedLeg) -> None:
        if self._legs.get(leg.name) is leg:
            del self._legs[leg.name]
            self._over(leg.key)


def _cancel_soon(inner: EngineStream, reason: str) -> None:
    """Cancel an engine's stream in its own callback: an exception is reported, and affects no other leg."""
    asyncio.get_running_loop().call_soon(inner.cancel, reason)


class SessionAnswer(Answer):
    """The answer of one leg over a session, written as credit allows."""

    task: asyncio.Task[None] | None = None
    _is_accepted = False
    _more: asyncio.Future[None] | None = None

    def resume(self) -> None:
        """Continue: there is credit, or room to write."""
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def accept(self) -> None:
        """Send that the worker accepted the leg."""
        self._is_accepted = True
        self._session.accept(self.stream_id)

    async def send(self, chunk: EngineChunk) -> None:
        """Send a chunk, in parts where the credit is less than the chunk."""
        self.send_chunk(await self._fitting(chunk))

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send the last chunk, in parts where the credit is less; the leg is over with the last part."""
        last = await self._fitting(chunk)
        over()
        self.send_chunk(last)

    async def end(self, error: Exception) -> None:
        """Send a refusal, or that the leg is lost."""
        self._session.fail(self.stream_id, error, is_accepted=self._is_accepted)

    async def _fitting(self, chunk: EngineChunk) -> EngineChunk:
        """Send the parts of ``chunk`` above the credit as credit comes; return the last part once it fits."""
        while True:
            await self._wait_for_room(credit_of(chunk))
            rest = self.rest_of(chunk)
            if rest is None:
                return chunk
            chunk = rest

    async def _wait_for_room(self, n_tokens: int) -> None:
        while not self.has_room(n_tokens):
            self._more = asyncio.get_running_loop().create_future()
            try:
                await self._more
            finally:
                self._more = None


class SessionLegs:
    """Runs the legs of one session at one worker. ``router`` is unique among sessions."""

    def __init__(self, leg_server: LegServer, router: str, session: WorkerSession) -> None:
        self._leg_server = leg_server
        self._router = router
        self._session = session
        self._answers: dict[int, SessionAnswer] = {}

    def begin(self, stream_id: int, credit_tokens: int, request: EngineRequest) -> Answer:
        """Serve a leg in a new task."""
        answer = self._answers[stream_id] = SessionAnswer(self._session, stream_id, credit_tokens)
        serving = self._leg_server.run(LegName(self._router, stream_id), request, answer)
        answer.task = spawn(serving, name="requests: serve a leg")
        answer.task.add_done_callback(lambda _task: self._forget(stream_id))
        return answer

    def cancel(self, stream_id: int, reason: str) -> None:
        """Cancel a leg, or free the KV of an ended prefill leg."""
        self._leg_server.cancel(LegName(self._router, stream_id), reason)
        answer = self._answers.get(stream_id)
        if answer is not None and answer.task is not None:
            answer.task.cancel()  # also where the leg has not begun yet

    def ended(self, reason: str) -> None:
        """Cancel all legs of the session: it has ended."""
        self._leg_server.drop_router(self._router, CONNECTION_CLOSED if reason == LEFT else reason)
        for answer in self._answers.values():
            if answer.task is not None:
                answer.task.cancel()

    def _forget(self, stream_id: int) -> None:
        del self._answers[stream_id]
        self._session.forget(stream_id)
