"""The worker's end of its legs, whatever wire they came over: which run here, and how each one ends."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import EngineChunk, EngineRequest, Leg
from kvrouter.planes.requests.awake import AwakeClock
from kvrouter.planes.requests.port import (
    EngineStream,
    RequestServer,
    StreamBroken,
    WorkerFull,
    WorkerUnreachable,
)

LEGS_MAX = 16_384
"""How many legs one worker runs at once; one more is refused as WorkerFull."""

PREFILLED_MAX = 1024
"""How many prefill legs that have ended can still be cancelled; the engine's own clock frees older ones."""

CONNECTION_CLOSED = "the router closed its connection"


class LegKey(NamedTuple):
    """What must not be served twice."""

    request_id: RequestId
    intake: str
    attempt: int
    leg: Leg


def key_of(request: EngineRequest) -> LegKey:
    """Return the key of a request's leg."""
    return LegKey(request.request_id, request.intake, request.attempt, request.leg)


class LegName(NamedTuple):
    """What a router calls one leg, for as long as the router lives."""

    router: str
    number: int


class RouterGone(Exception):
    """Nobody hears what a leg answers any more."""


class Answer(Protocol):
    """How a wire carries what one leg answers. ``accept`` and ``send`` raise :class:`RouterGone`."""

    async def accept(self) -> None:
        """The worker took the leg."""

    async def send(self, chunk: EngineChunk) -> None:
        """Send ``chunk``; return once there is room for another."""

    async def end(self, error: Exception) -> None:
        """The leg was refused or, once it was accepted, lost. Raises nothing."""


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
            self.inner.cancel(reason)

    def end_task(self) -> None:
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()


class Place:
    """One worker's place in a plane: the registration of its server, and the legs that run there."""

    def __init__(
        self, address: str, server: RequestServer, clock: AwakeClock, on_leave: Callable[[], None]
    ) -> None:
        self.address = address
        self._server = server
        self._on_leave = on_leave
        self._clock = clock
        self._legs: dict[LegKey, _ServedLeg] = {}
        self._names: dict[LegName, _ServedLeg] = {}
        self._prefilled: OrderedDict[LegName, EngineStream] = OrderedDict()
        self._heard_s: dict[str, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._left: str | None = None

    @property
    def running_legs(self) -> int:
        """How many legs run here: from the request to the last chunk, a failure or a cancellation."""
        return len(self._legs)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, or ``limit_s`` seconds; return whether none does."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def leave(self, why: str) -> None:
        """Open streams break, new ones are refused. Idempotent."""
        if self._left is not None:
            return
        self._left = f"{self.address}: {why}"
        self._on_leave()
        for leg in tuple(self._legs.values()):
            leg.broken = self._left
            leg.cancel(why)
            leg.end_task()

    async def run(self, name: LegName, request: EngineRequest, answer: Answer) -> None:
        """Serve one leg to its end, in the calling task. CancelledError when the leg was cancelled."""
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
            lost = WorkerUnreachable if leg.inner is None else StreamBroken
            await answer.end(lost(leg.broken))
        except RouterGone:
            self._stop(leg, CONNECTION_CLOSED)
        except KvrouterError as error:
            leg.cancel("its answer was lost")
            await answer.end(error)
        except Exception as error:  # noqa: BLE001 - a mistake of an engine ends its leg, not its worker
            leg.cancel("its answer was lost")
            lost = WorkerUnreachable if leg.inner is None else StreamBroken
            await answer.end(lost(f"the worker failed: {type(error).__name__}: {error}"))
        finally:
            self._forget(leg)

    def cancel(self, name: LegName, reason: str) -> None:
        """The router wants no more of a leg, or will not decode what it prefilled. Idempotent."""
        leg = self._names.get(name)
        if leg is not None:
            self._stop(leg, reason)
        prefilled = self._prefilled.pop(name, None)
        if prefilled is not None:
            prefilled.cancel(reason)

    def hear(self, router: str) -> None:
        """A router is alive."""
        if router in self._heard_s:
            self._heard_s[router] = self._clock.now_s

    def keep_only(self, router: str, numbers: Collection[int]) -> None:
        """Cancel the legs of ``router`` that it does not name: it gave them up, and the word was lost."""
        for name in [name for name in self._names if name.router == router and name.number not in numbers]:
            self.cancel(name, "the router gave the leg up")

    def cancel_silent(self, dead_after_s: float) -> None:
        """Cancel the legs of every router that was not heard for ``dead_after_s``, and what it prefilled."""
        now_s = self._clock.now_s
        silent = {router for router, at_s in self._heard_s.items() if now_s - at_s > dead_after_s}
        for router in silent:
            del self._heard_s[router]
        for name in [name for name in (*self._names, *self._prefilled) if name.router in silent]:
            self.cancel(name, f"the router was not heard for {dead_after_s} s")

    def _admit(self, leg: _ServedLeg) -> None:
        if self._left is not None:
            raise WorkerUnreachable(self._left)
        if leg.key in self._legs or leg.name in self._names:
            raise WorkerUnreachable(f"{leg.key.request_id}#{leg.key.attempt}: this leg runs here already")
        if len(self._legs) >= LEGS_MAX:
            raise WorkerFull(f"{self.address}: {LEGS_MAX} legs run")
        self._legs[leg.key] = self._names[leg.name] = leg
        self._heard_s[leg.name.router] = self._clock.now_s
        self._idle.clear()

    async def _answer(self, leg: _ServedLeg, inner: EngineStream, answer: Answer) -> None:
        async for chunk in inner:
            if chunk.finish is None:
                await answer.send(chunk)
                continue
            self._forget(leg)
            if leg.key.leg is Leg.PREFILL:
                self._prefilled[leg.name] = inner
                if len(self._prefilled) > PREFILLED_MAX:
                    self._prefilled.popitem(last=False)
            await answer.send(chunk)
            return
        raise StreamBroken(f"{self.address}: the engine ended a leg without a last chunk")

    def _stop(self, leg: _ServedLeg, reason: str) -> None:
        """Tell the engine, unless the leg has ended, and end the task."""
        if self._names.get(leg.name) is leg:
            self._forget(leg)
            leg.cancel(reason)
            leg.end_task()

    def _forget(self, leg: _ServedLeg) -> None:
        if self._names.get(leg.name) is not leg:
            return
        del self._names[leg.name], self._legs[leg.key]
        if not self._legs:
            self._idle.set()
