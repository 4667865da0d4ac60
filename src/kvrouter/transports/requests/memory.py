"""The request transport within one process."""

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
    """Return the address of a worker of this process."""
    return f"memory://{worker_id}/{incarnation}"


class MemoryStream:
    """One open leg. Its reader awaits the worker's own stream, without a copy in between."""

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
            # break_off cancels the waiting reader: handle that here, unless others cancelled it too.
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
        """Ask the worker to stop and to free the leg's resources; idempotent, allowed at any time."""
        if self._broken is None:
            self._inner.cancel(reason)
        self._registration.release(self._key, self)

    def break_off(self, why: str) -> None:
        """End the stream with StreamBroken: the worker is lost."""
        if self._broken is None and not self._ended:
            self._broken = why
            if self._reader is not None:
                self._reader.cancel()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise StreamBroken(self._broken)

    def _end(self) -> None:
        self._ended = True
        self._registration.release(self._key, self)


class MemoryRegistration(RunningLegs):
    """The registration of one worker, from :meth:`MemoryRequestTransport.serve` until it leaves."""

    def __init__(self, transport: "MemoryRequestTransport", address: str, server: RequestServer) -> None:
        super().__init__(address)
        self._transport = transport
        self._server = server
        self._streams: dict[LegKey, MemoryStream] = {}
        self._released: WeakSet[MemoryStream] = WeakSet()
        """Streams that ended or were cancelled and are still referenced by a reader."""

    async def open(self, request: EngineRequest, open_timeout_s: float) -> MemoryStream:
        """Pass ``request`` to the worker. Raises LegRepeated for a leg that runs or ran here."""
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
        """Break open streams and refuse new ones: the worker is gone. Idempotent."""
        self._transport.forget(self.address)
        for stream in self._take_streams():
            stream.break_off(f"{self.address}: {why}")

    def hang_up(self) -> None:
        """Cancel all legs at the worker and break their streams: the router is gone."""
        for stream in self._take_streams():
            stream.cancel("the router closed its connection")
            stream.break_off("the plane was closed")

    def release(self, key: LegKey, stream: MemoryStream) -> None:
        """Release a leg that has ended or was cancelled; its reader may still learn of a lost worker."""
        if self._streams.pop(key, None) is not None:
            self._over(key)
            self._released.add(stream)

    def _take_streams(self) -> list[MemoryStream]:
        """Return every stream that may still have a reader, and end all legs."""
        streams = [*self._streams.values(), *self._released]
        self._streams.clear()
        self._released.clear()
        for key in tuple(self._running):
            self._over(key)
        return streams


class MemoryRequestTransport:
    """The request transport to workers of this process, by the address on their card."""

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
        """Return the address of a worker that is served here."""
        return memory_address(worker_id, incarnation)

    def forget(self, address: str) -> None:
        """Remove the registration of ``address``."""
        if self._registrations.pop(address, None) is not None:
            self._notify(address, is_alive=False)

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Call ``on_alive`` when the worker at ``address`` leaves, and when it serves again."""
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
            self._followers[address].notify(is_alive=is_alive)

    def _notify_if_gone(self, address: str) -> None:
        if address not in self._registrations:
            self._notify(address, is_alive=False)

    async def open(self, address: str, request: EngineRequest) -> EngineStream:
        """Send ``request``; return once the worker accepted it. Raises WorkerUnreachable without a worker."""
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
