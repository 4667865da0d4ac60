"""Requests within one process."""

import asyncio
from collections.abc import Callable
from weakref import WeakSet

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.transports.requests.legs import LegKey, RunningLegs, key_of
from kvrouter.transports.requests.port import (
    AliveSink,
    EngineStream,
    LivenessListeners,
    RequestServer,
    StreamBroken,
    WorkerUnreachable,
)


def memory_address(worker_id: WorkerId, incarnation: Epoch) -> str:
    """Return the address under which a worker of this process is reached."""
    return f"memory://{worker_id}/{incarnation}"


class MemoryStream:
    """One open leg. It adds nothing to a chunk: a reader awaits the worker's own stream."""

    def __init__(self, inner: EngineStream, key: LegKey, registration: "MemoryRegistration") -> None:
        self._inner = inner
        self._key = key
        self._registration = registration
        self._broken: str | None = None
        self._ended = False
        self._reader: asyncio.Task[object] | None = None

    def __aiter__(self) -> "MemoryStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._ended:
            raise StopAsyncIteration
        self._raise_if_broken()
        reader = self._reader = asyncio.current_task()
        try:
            chunk = await self._inner.__anext__()
        except asyncio.CancelledError:
            # break_off cancels the waiting reader: the cancellation ends here unless others asked too.
            if self._broken is not None and reader is not None and reader.uncancel() == 0:
                raise StreamBroken(self._broken) from None
            raise
        except Exception:
            self._end()
            raise
        finally:
            self._reader = None
        if chunk.finish is not None:
            self._end()
        return chunk

    def cancel(self, reason: str) -> None:
        """Ask the worker to stop and free what it holds; idempotent, allowed at any time."""
        if self._broken is None:
            self._inner.cancel(reason)
        self._registration.let_go(self._key, self)

    def break_off(self, why: str) -> None:
        """The worker is lost: the reader gets StreamBroken."""
        if self._broken is None and not self._ended:
            self._broken = why
            if self._reader is not None:
                self._reader.cancel()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise StreamBroken(self._broken)

    def _end(self) -> None:
        self._ended = True
        self._registration.let_go(self._key, self)


class MemoryRegistration(RunningLegs):
    """One worker's place in the plane, from :meth:`MemoryRequestPlane.serve` until it leaves."""

    def __init__(self, plane: "MemoryRequestPlane", address: str, server: RequestServer) -> None:
        super().__init__(address)
        self._plane = plane
        self._server = server
        self._streams: dict[LegKey, MemoryStream] = {}
        self._let_go: WeakSet[MemoryStream] = WeakSet()
        """Streams that ended or were cancelled: most have no reader any more, and then they are gone."""

    async def open(self, request: EngineRequest, open_timeout_s: float) -> MemoryStream:
        """Hand ``request`` to the worker. A leg that runs or ran here is refused, not served twice."""
        key = key_of(request)
        self._begin(key)
        try:
            async with asyncio.timeout(open_timeout_s):
                inner = await self._server.submit(request)
        except TimeoutError:
            self._over(key)
            raise WorkerUnreachable(f"{self.address} did not answer in {open_timeout_s} s") from None
        except BaseException:
            self._over(key)
            raise
        if key not in self._running:
            inner.cancel("the worker left while the request was sent")
            raise WorkerUnreachable(f"{self.address} left while the request was sent")
        stream = self._streams[key] = MemoryStream(inner, key, self)
        return stream

    def leave(self, why: str) -> None:
        """The worker is gone: open streams break, new ones are refused. Idempotent."""
        self._plane.forget(self.address)
        for stream in self._take_streams():
            stream.break_off(f"{self.address}: {why}")

    def hang_up(self) -> None:
        """The router is gone: the worker is asked to stop what it does for it, and open streams break."""
        for stream in self._take_streams():
            stream.cancel("the router closed its connection")
            stream.break_off("the plane was closed")

    def let_go(self, key: LegKey, stream: MemoryStream) -> None:
        """The leg has ended, or was cancelled; a reader that reads on hears of a lost worker."""
        if self._streams.pop(key, None) is not None:
            self._over(key)
            self._let_go.add(stream)

    def _take_streams(self) -> list[MemoryStream]:
        """Every stream that someone may still read; no leg runs here afterwards."""
        streams = [*self._streams.values(), *self._let_go]
        self._streams.clear()
        self._let_go.clear()
        for key in tuple(self._running):
            self._over(key)
        return streams


class MemoryRequestPlane:
    """Reaches the workers of this process by the address on their card."""

    def __init__(self, *, open_timeout_s: float = 5.0) -> None:
        self._open_timeout_s = open_timeout_s
        self._registrations: dict[str, MemoryRegistration] = {}
        self._followers: dict[str, LivenessListeners] = {}
        self._closed = False

    def serve(self, address: str, server: RequestServer) -> MemoryRegistration:
        """Make ``server`` reachable under ``address`` until the registration leaves."""
        if address in self._registrations:
            raise ConfigError(f"{address} is served already", param="address")
        registration = self._registrations[address] = MemoryRegistration(self, address, server)
        self._notify(address, is_alive=True)
        return registration

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """The address of a worker that is served here."""
        return memory_address(worker_id, incarnation)

    def forget(self, address: str) -> None:
        """Nobody serves ``address`` any more."""
        if self._registrations.pop(address, None) is not None:
            self._notify(address, is_alive=False)

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Notify when the worker at ``address`` leaves, and when it serves again."""
        followers = self._followers.setdefault(address, LivenessListeners())
        forget = followers.add(on_alive)
        if address not in self._registrations:
            asyncio.get_running_loop().call_soon(self._notify_if_gone, address)

        def end() -> None:
            forget()
            if not followers and self._followers.get(address) is followers:
                del self._followers[address]

        return end

    def _notify(self, address: str, *, is_alive: bool) -> None:
        if address in self._followers:
            self._followers[address].tell(is_alive=is_alive)

    def _notify_if_gone(self, address: str) -> None:
        if address not in self._registrations:
            self._notify(address, is_alive=False)

    async def open(self, address: str, request: EngineRequest) -> EngineStream:
        """Send ``request``; return once the worker accepted it. WorkerUnreachable when nobody is there."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        registration = self._registrations.get(address)
        if registration is None:
            raise WorkerUnreachable(f"nobody serves {address}")
        return await registration.open(request, self._open_timeout_s)

    async def close(self) -> None:
        """Close every connection; open streams break."""
        self._closed = True
        for registration in self._registrations.values():
            registration.hang_up()
