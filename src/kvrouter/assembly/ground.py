"""What a worker beside an engine stands on: the planes of this process, or wires to others."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvrouter.assembly.attach_words import Attached
from kvrouter.assembly.engine_worker import EngineWorkerSpec
from kvrouter.assembly.mock_fleet import MemoryPlanes
from kvrouter.assembly.router_wires import settled
from kvrouter.assembly.standby import Holders, holders
from kvrouter.assembly.worker_wires import worker_wires
from kvrouter.config import Settings
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import EventLane, EventSource, Role
from kvrouter.planes.discovery.leases import lost_why
from kvrouter.planes.discovery.port import Discovery, Gone
from kvrouter.planes.events.port import EventPublisher, RecoveryServer
from kvrouter.planes.requests.memory import memory_address
from kvrouter.planes.requests.port import RequestAcceptor
from kvrouter.telemetry import Event, log_event

_log = logging.getLogger("kvrouter.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What one worker stands on; ``lost`` is set when another start of its id has its place."""

    discovery: Discovery
    events: EventPublisher
    requests: RequestAcceptor
    recovery: RecoveryServer
    source: EventSource
    address_of: Callable[[WorkerId, Epoch], str]
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Ground(Protocol):
    """Where all workers of a process stand."""

    def stand(self, spec: EngineWorkerSpec, attached: Attached) -> AbstractAsyncContextManager[Stand]:
        """What the worker beside this engine stands on. Raises KvrouterError where it cannot be had."""


class MemoryGround:
    """The front door is in this process."""

    def __init__(self, planes: MemoryPlanes) -> None:
        self._planes = planes

    @asynccontextmanager
    async def stand(self, _spec: EngineWorkerSpec, _attached: Attached) -> AsyncIterator[Stand]:
        """Nothing has to be made, and nobody else can have its place."""
        yield Stand(
            discovery=self._planes.discovery,
            events=self._planes.events,
            requests=self._planes.requests,
            recovery=self._planes.events,
            source=EventSource(EventLane.MEMORY),
            address_of=memory_address,
        )


class WiredGround:
    """Front doors are elsewhere: each worker has a port and announces itself, once nobody else has its id."""

    def __init__(self, settings: Settings, known: Holders) -> None:
        self._settings = settings
        self._known = known

    @asynccontextmanager
    async def stand(self, spec: EngineWorkerSpec, attached: Attached) -> AsyncIterator[Stand]:
        """Wait until the place is free, and connect what the settings ask for."""
        lost = asyncio.Event()

        def on_lost(worker_id: WorkerId, _: Epoch, how: Gone) -> None:
            log_event(_log, Event.WORKER_REPLACED, worker=str(worker_id), reason=f"{lost_why(how)}: waiting")
            lost.set()

        await self._known.until_free(spec.worker_id)
        async with worker_wires(
            self._settings,
            component="prefill" if spec.at.role is Role.PREFILL else "backend",
            has_local_indexer=spec.enable_local_indexer,
            publishes_kv_events=attached.publishes_kv_events,
            on_lost=on_lost,
        ) as wires:
            yield Stand(
                discovery=wires.discovery,
                events=wires.events,
                requests=wires.requests,
                recovery=wires.recovery,
                source=wires.events.source,
                address_of=wires.requests.address_of,
                lost=lost,
            )


@asynccontextmanager
async def wired_ground(settings: Settings) -> AsyncIterator[WiredGround]:
    """The ground of workers whose front doors are elsewhere: one watch tells all of them who has their
    places.

    Everything that the settings ask for is connected once, so that a mistake in them is told of no engine:
    raises NatsUnreachable, or ConfigError that names the setting.
    """
    if settings.planes.listen_port:
        raise ConfigError(
            "--listen-port: must be 0: every engine's worker has a port of its own", param="listen_port"
        )
    settings = settled(settings, kv_events=True)  # one place for all of them, whatever their engines tell
    async with (
        worker_wires(
            settings, component="backend", has_local_indexer=False, publishes_kv_events=True
        ) as wires,
        holders(wires.discovery) as known,
    ):
        yield WiredGround(settings, known)
