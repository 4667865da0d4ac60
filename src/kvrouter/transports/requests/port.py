"""The port of request transports: how a leg reaches a worker, and how its tokens come back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest

AliveSink = Callable[[bool], None]
"""Whether a worker answers."""

TokenSink = Callable[[Sequence[int]], bool]
"""Takes tokens in the loop turn in which they arrive; returns whether it wants more that way."""


class WorkerUnreachable(KvrouterError):
    """The worker, or its engine, never accepted the request: sending it elsewhere is safe."""

    code = "worker_unreachable"


class WorkerFull(WorkerUnreachable):
    """The worker's own queue is full: it takes no more requests for now."""

    code = "worker_full"


class WorkerDeclined(WorkerUnreachable):
    """The worker's engine declines this leg, without a fault: another worker may take it."""

    code = "worker_declined"


class LegRepeated(WorkerUnreachable):
    """The worker runs or ran this leg already: the request arrived twice. No fault of the worker."""

    code = "leg_repeated"
    status_hint = 409


class StreamBroken(KvrouterError):
    """The worker accepted the request and was lost before its last chunk."""

    code = "stream_broken"


class EngineFailed(WorkerUnreachable):
    """The worker's engine answered that this call failed."""

    code = "engine_failed"


class EngineFailedLater(StreamBroken):
    """The engine reported a failure of a call that it had accepted."""

    code = "engine_failed_later"


class ReaderTooSlow(KvrouterError):
    """The leg was cancelled because its client read nothing for too long: a retry does not help."""

    code = "reader_too_slow"


class EngineStream(Protocol):
    """The answer to one leg. Iterating raises :class:`StreamBroken` when the worker or its engine is lost,
    :class:`WorkerUnreachable` when the engine declines the leg after the stream began.

    The stream holds a bounded number of chunks: a slow reader withholds its own credit and stops only its own
    producer. Waiting chunks may be merged: tokens are never lost or reordered.
    """

    def __aiter__(self) -> AsyncIterator[EngineChunk]: ...

    async def __anext__(self) -> EngineChunk: ...

    def cancel(self, reason: str) -> None:
        """Ask the worker to stop and to free the leg's resources; idempotent, allowed at any time.

        A pending or later read returns at once a chunk with the finish ``CANCELLED``. For an ended prefill
        leg, the KV that waits for its decode worker is freed.
        """


class SentLeg(EngineStream, Protocol):
    """The stream of a leg that was sent, whether or not its worker has accepted it yet.

    A read before that waits, and raises what the worker refuses the leg with; or, in bounded time,
    :class:`WorkerUnreachable` when the worker is lost first or does not accept. The leg is then cancelled.
    """

    @property
    def is_accepted(self) -> bool:
        """Whether the worker accepted the leg: an error of a read is no refusal then."""

    async def accepted(self) -> None:
        """Return once the worker accepted the leg, or the leg was cancelled; raise as a read does."""

    async def hand_over(self, sink: TokenSink) -> None:
        """Pass ``sink`` all tokens that arrive, until it returns False or something other than bare tokens
        arrives (an end, a failure, a cancellation): the next read returns that. So tokens do not wake a task
        for each stream. An exception of ``sink`` is raised here. Tokens passed to ``sink`` count as read. A
        transport that has no such tokens returns at once.
        """

    def cancel(self, reason: str) -> None:
        """Cancel as :meth:`EngineStream.cancel` does, also a leg that is not accepted yet.

        A leg that fetches KV is cancelled at its worker only once that has accepted it, or after the open
        timeout: often only the decode worker can tell the prefill worker to free the KV.
        """


class RequestTransport(Protocol):
    """Opens streams to workers by the address on their card."""

    async def open(self, address: str, request: EngineRequest) -> SentLeg:
        """Send ``request``, without waiting for the worker to accept it; the stream's first read shows that.

        Raises :class:`WorkerUnreachable`, in bounded time, where nothing can be sent.
        """

    def open_now(self, address: str, request: EngineRequest) -> SentLeg | None:
        """Open as :meth:`open` does, where that need not wait for a connection; else return None."""

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Report the liveness of the worker at ``address``; return the function that stops it, idempotent.

        The worker counts as alive at first. ``on_alive(False)`` is called when it does not answer, in bounded
        time, and ``on_alive(True)`` when it answers again; never the same twice in a row. The transport keeps
        trying while the worker is followed.

        Raises :class:`WorkerUnreachable` for an address that this transport can never reach.
        """

    async def close(self) -> None:
        """Close every connection; open streams break."""


class RequestServer(Protocol):
    """The worker's server behind a request transport: takes a leg, answers with chunks."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Accept ``request`` and return its stream; raise an error of the core tree to refuse it."""


class Registration(Protocol):
    """The registration of a worker at a request transport."""

    async def served(self) -> None:
        """Return once routers can reach the worker. Raises ConfigError when that fails."""

    @property
    def running_legs(self) -> int:
        """The number of running legs: from the request to the last chunk, a failure or a cancellation."""

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, at most ``limit_s`` seconds; return whether that is so."""

    def leave(self, why: str) -> None:
        """Break open streams and refuse new ones. Idempotent."""


class RequestAcceptor(Protocol):
    """The worker's end of a request transport."""

    def serve(self, address: str, server: RequestServer) -> Registration:
        """Make ``server`` reachable under ``address`` until the registration leaves."""

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return the address of a worker that is served here."""


class LivenessListeners:
    """The followers of one worker. Each takes it to be alive until it is notified otherwise."""

    def __init__(self) -> None:
        self._sinks: dict[object, AliveSink] = {}
        self._notified_dead: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def add(self, on_alive: AliveSink) -> Callable[[], None]:
        """Add a follower; return the function that removes it, idempotent."""
        key = object()
        self._sinks[key] = on_alive

        def end() -> None:
            self._sinks.pop(key, None)
            self._notified_dead.discard(key)

        return end

    def notify(self, *, is_alive: bool) -> None:
        """Notify followers of a new state. An exception of one follower is reported, and affects no other."""
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
