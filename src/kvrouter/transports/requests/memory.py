"""The request transport within one process."""

import asyncio
from collections.abc import Callable
from weakref import WeakSet

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.transports.background import spawn
from kvrouter.transports.requests.legs import LegKey, RunningLegs, key_of
from kvrouter.transports.requests.port import (
    AliveSink,
    EngineStream,
    LivenessListeners,
    RequestServer,
    StreamBroken,
    TokenSink,
    WorkerUnreachable,
)


def memory_address(worker_id: WorkerId, incarnation: Epoch) -> str:
    """Return the address of a worker of this process."""
    return f"memory://{worker_id}/{incarnation}"


class MemoryStream:
    """One open leg. Its reader awaits the worker's own stream, without a copy in between."""

    def __init__(self, request: EngineRequest, registration: "MemoryRegistration") -> None:
        self.key = key_of(request)
        self._fetches_kv = bool(request.kv_transfer_params)
        self._registration = registration
        self._inner: EngineStream | None = None
        self._submitting: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set once the worker accepted or refused the leg, or the leg was cancelled or broken."""
        self._failure: Exception | None = None
        self._cancelled_for: str | None = None
        self._ended = False
        self._reader: asyncio.Task[object] | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the worker accepted the leg."""
        return self._inner is not None

    async def accepted(self) -> None:
        """Return once the worker accepted the leg, or the leg was cancelled; raise as a read does."""
        await self._settled.wait()
        if self._inner is None:
            self._raise_failure()

    def submit(self, server: RequestServer, request: EngineRequest, limit_s: float) -> None:
        """Pass ``request`` to the worker, in a task; end the leg if it is not accepted in ``limit_s``."""
        self._submitting = spawn(self._submit(server, request, limit_s), name="requests: submit a leg")

    def refuse(self, error: Exception) -> None:
        """End the stream, with ``error`` if it was not cancelled: the worker does not accept the leg."""
        if self._cancelled_for is None:
            self._failure = error
        self._settled.set()
        self._registration.release(self)

    def __aiter__(self) -> "MemoryStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._inner is None:
            await self._settled.wait()
        if self._ended:
            raise StopAsyncIteration
        self._raise_failure()
        if self._inner is None:
            self._ended = True
            return EngineChunk(finish=FinishReason.CANCELLED)
        reader = self._reader = asyncio.current_task()
        try:
            chunk = await self._inner.__anext__()
        except asyncio.CancelledError:
            # break_off cancels the waiting reader: handle that here, unless others cancelled it too.
            if self._failure is not None and reader is not None and reader.uncancel() == 0:
                raise self._failure from None
            raise
        except Exception:
            self._end()
            raise
        finally:
            self._reader = None
        if chunk.finish is not None:
            self._end()
        return chunk

    async def hand_over(self, sink: TokenSink) -> None:
        """Return at once: tokens are read from the worker's own stream."""

    def cancel(self, reason: str) -> None:
        """Ask the worker to stop and to free the leg's resources; idempotent, allowed at any time."""
        if self._failure is None:
            if self._inner is not None:
                self._inner.cancel(reason)
            else:
                self._cancelled_for = self._cancelled_for or reason
                self._settled.set()
                if self._fetches_kv:
                    return  # cancelled once the worker has accepted it
                self._stop_submitting()
        self._registration.release(self)

    def break_off(self, why: str) -> None:
        """End the stream: the worker is lost. A leg that it had not accepted may be sent elsewhere."""
        if self._failure is None and not self._ended:
            if self._inner is None:
                self._stop_submitting()
            self._failure = WorkerUnreachable(why) if self._inner is None else StreamBroken(why)
            self._settled.set()
            if self._reader is not None:
                self._reader.cancel()

    async def _submit(self, server: RequestServer, request: EngineRequest, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                self._inner = await server.submit(request)
        except TimeoutError:
            self.refuse(WorkerUnreachable(f"{self._registration.address} did not answer in {limit_s} s"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader gets it
            self.refuse(error)
        else:
            self._settled.set()
            if self._cancelled_for is not None:
                self.cancel(self._cancelled_for)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stop_submitting(self) -> None:
        if self._submitting is not None:
            self._submitting.cancel()

    def _end(self) -> None:
        self._ended = True
        self._registration.release(self)


class MemoryRegistration(RunningLegs):
    """The registration of one worker, from :meth:`MemoryRequestTransport.serve` until it leaves."""

    def __init__(self, transport: "MemoryRequestTransport", address: str, server: RequestServer) -> None:
        super().__init__(address)
        self._transport = transport
        self._server = server
        self._streams: dict[LegKey, MemoryStream] = {}
        self._released: WeakSet[MemoryStream] = WeakSet()
        """Streams that ended or were cancelled and are still referenced by a reader."""

    def open(self, request: EngineRequest, limit_s: float) -> MemoryStream:
        """Pass ``request`` to the worker, which has ``limit_s`` to accept it.

        A leg that runs or ran here is refused with LegRepeated.
        """
        stream = MemoryStream(request, self)
        try:
            self._begin(stream.key)
        except WorkerUnreachable as error:
            stream.refuse(error)
        else:
            self._streams[stream.key] = stream
            stream.submit(self._server, request, limit_s)
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

    def release(self, stream: MemoryStream) -> None:
        """Release a leg that has ended or was cancelled; its reader may still learn of a lost worker."""
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
            self._over(stream.key)
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

    async def open(self, address: str, request: EngineRequest) -> MemoryStream:
        """Send ``request``. Raises WorkerUnreachable without a worker."""
        return self.open_now(address, request)

    def open_now(self, address: str, request: EngineRequest) -> MemoryStream:
        """Send ``request``. Raises WorkerUnreachable without a worker."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        registration = self._registrations.get(address)
        if registration is None:
            raise WorkerUnreachable(f"nobody serves {address}")
        return registration.open(request, self._open_timeout_s)

    async def close(self) -> None:
        """Close every connection; open streams break."""
        self._closed = True
        for registration in self._registrations.values():
            registration.hang_up()
