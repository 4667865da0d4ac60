"""The port of requests: how one leg reaches a worker, and how its tokens come back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, runtime_checkable

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest

AliveSink = Callable[[bool], None]
"""Whether a worker answers."""

TokenSink = Callable[[Sequence[int]], bool]
"""Takes tokens in the turn of the loop in which they arrive; returns whether it wants more that way."""


class WorkerUnreachable(KvrouterError):
    """The worker never accepted the request, or its engine did not: sending it elsewhere is safe."""

    code = "worker_unreachable"


class WorkerFull(WorkerUnreachable):
    """The worker takes no more requests for now: its own queue is full."""

    code = "worker_full"


class WorkerDeclined(WorkerUnreachable):
    """The worker's engine does not take this leg, and nothing is known against it: another may take it."""

    code = "worker_declined"


class LegRepeated(WorkerUnreachable):
    """The worker runs this very leg, or ran it: it arrived twice. No fault of the worker's."""

    code = "leg_repeated"
    status_hint = 409


class StreamBroken(KvrouterError):
    """The worker accepted the request and was lost before its last chunk."""

    code = "stream_broken"


class EngineFailed(WorkerUnreachable):
    """The worker's engine answers, and says that it failed this call."""

    code = "engine_failed"


class EngineFailedLater(StreamBroken):
    """The engine had accepted the call when it said that it failed."""

    code = "engine_failed_later"


class ReaderTooSlow(KvrouterError):
    """The leg was cancelled because its reader took nothing for too long: sending it again helps nobody."""

    code = "reader_too_slow"


class EngineStream(Protocol):
    """The answer to one leg. Iterating raises :class:`StreamBroken` when the worker or its engine is lost,
    :class:`WorkerUnreachable` where only later shows that its engine does not take it.

    The stream holds a bounded number of chunks: a slow reader withholds its own credits and stops only its
    own producer. Chunks that wait may be merged: tokens are never lost or reordered.
    """

    def __aiter__(self) -> AsyncIterator[EngineChunk]: ...

    async def __anext__(self) -> EngineChunk: ...

    def cancel(self, reason: str) -> None:
        """Ask the worker to stop and free what it holds; idempotent, allowed at any time.

        A pending or later read ends at once with a chunk whose finish is ``CANCELLED``. For a prefill leg
        that has ended, the KV that still waits for its decode worker is freed.
        """


@runtime_checkable
class HandingStream(EngineStream, Protocol):
    """A stream that can call its reader, so that tokens of many streams cost no wake-up of a task each."""

    async def hand_over(self, sink: TokenSink) -> None:
        """Give ``sink`` all tokens that arrive, until it returns False or anything else than bare tokens
        comes (an end, a failure, a cancellation): the next read brings that. What ``sink`` raises is raised
        here. Tokens that ``sink`` was given count as read.
        """


class RequestPlane(Protocol):
    """Opens streams to workers by the address on their card."""

    async def open(self, address: str, request: EngineRequest) -> EngineStream:
        """Send ``request``; return once the worker accepted it.

        Raises :class:`WorkerUnreachable` when it did not, in bounded time.
        """

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Keep watch over the worker at ``address``; return the function that ends it, idempotent.

        Until it is notified otherwise the caller may take the worker to be alive. ``on_alive(False)`` when it
        is found not to answer, in bounded time, ``on_alive(True)`` when it answers again; never the same
        twice in a row. The plane goes on trying for as long as it follows.

        Raises :class:`WorkerUnreachable` for an address that this plane could never reach.
        """

    async def close(self) -> None:
        """Close every connection; open streams break."""


class RequestServer(Protocol):
    """What a worker offers to its plane: take a leg, answer with chunks."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Accept ``request`` and return its stream; raise an error of the core tree to refuse it."""


class Registration(Protocol):
    """A worker's place in the request plane."""

    async def served(self) -> None:
        """Return once routers can reach the worker. Raises ConfigError when that cannot be had."""

    @property
    def running_legs(self) -> int:
        """How many legs run here: from the request to the last chunk, a failure or a cancellation."""

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, or ``limit_s`` seconds; return whether none does."""

    def leave(self, why: str) -> None:
        """Open streams break, new ones are refused. Idempotent."""


class RequestAcceptor(Protocol):
    """A worker's end of the request plane."""

    def serve(self, address: str, server: RequestServer) -> Registration:
        """Make ``server`` reachable under ``address`` until the registration leaves."""

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """The address of a worker that is served here."""


class LivenessListeners:
    """The followers of one worker. Each takes it to be alive until it is notified otherwise."""

    def __init__(self) -> None:
        self._sinks: dict[object, AliveSink] = {}
        self._notified_dead: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def add(self, on_alive: AliveSink) -> Callable[[], None]:
        """Notify ``on_alive`` from now on; return the function that ends it, idempotent."""
        key = object()
        self._sinks[key] = on_alive

        def end() -> None:
            self._sinks.pop(key, None)
            self._notified_dead.discard(key)

        return end

    def tell(self, *, is_alive: bool) -> None:
        """Notify those that do not know: never the same twice in a row. A follower's mistake is its own."""
        for key, on_alive in tuple(self._sinks.items()):
            if (key in self._notified_dead) is not is_alive or key not in self._sinks:
                continue
            if is_alive:
                self._notified_dead.discard(key)
            else:
                self._notified_dead.add(key)
            try:
                on_alive(is_alive)
            except Exception as error:  # noqa: BLE001 - the watch goes on, for the others too
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a follower of a worker failed", "exception": error}
                )
