"""Gives an attached worker its transports: those of this process, or network ones."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvrouter.config.tree import Settings
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import EventLane, EventSource, Role
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.processes.standby import Holders, holders
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.discovery.card_tracker import lost_why
from kvrouter.transports.discovery.port import Discovery, Gone
from kvrouter.transports.events.port import EventPublisher, RecoveryServer
from kvrouter.transports.requests.memory import memory_address
from kvrouter.transports.requests.port import RequestAcceptor
from kvrouter.wiring.mock_fleet import MemoryPlanes
from kvrouter.wiring.router_transports import settled
from kvrouter.wiring.worker_transports import open_worker_transports

_log = logging.getLogger("kvrouter.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTransports:
    """The transports of one worker; ``lost`` is set when another start of its id has its place."""

    discovery: Discovery
    events: EventPublisher
    requests: RequestAcceptor
    recovery: RecoveryServer
    source: EventSource
    address_of: Callable[[WorkerId, Epoch], str]
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class TransportProvider(Protocol):
    """Provides the transports of all workers of a process."""

    def stand(self, spec: AttachSpec, attached: Attached) -> AbstractAsyncContextManager[WorkerTransports]:
        """The transports of this engine's worker. Raises KvrouterError where it cannot be had."""


class MemoryTransports:
    """The frontend is in this process."""

    def __init__(self, planes: MemoryPlanes) -> None:
        self._planes = planes

    @asynccontextmanager
    async def stand(self, _spec: AttachSpec, _attached: Attached) -> AsyncIterator[WorkerTransports]:
        """Nothing has to be made, and nobody else can have its place."""
        yield WorkerTransports(
            discovery=self._planes.discovery,
            events=self._planes.events,
            requests=self._planes.requests,
            recovery=self._planes.events,
            source=EventSource(EventLane.MEMORY),
            address_of=memory_address,
        )


class NetworkTransports:
    """Frontends are elsewhere: each worker has a port and announces itself, once nobody else has its id."""

    def __init__(self, settings: Settings, known: Holders) -> None:
        self._settings = settings
        self._known = known

    @asynccontextmanager
    async def stand(self, spec: AttachSpec, attached: Attached) -> AsyncIterator[WorkerTransports]:
        """Wait until the place is free, and connect what the settings ask for."""
        lost = asyncio.Event()

        def on_lost(worker_id: WorkerId, _: Epoch, how: Gone) -> None:
            log_event(_log, Event.WORKER_REPLACED, worker=str(worker_id), reason=f"{lost_why(how)}: waiting")
            lost.set()

        await self._known.until_free(spec.worker_id)
        async with open_worker_transports(
            self._settings,
            component="prefill" if spec.role is Role.PREFILL else "backend",
            has_local_indexer=spec.enable_local_indexer,
            publishes_kv_events=attached.publishes_kv_events,
            on_lost=on_lost,
        ) as wires:
            yield WorkerTransports(
                discovery=wires.discovery,
                events=wires.events,
                requests=wires.requests,
                recovery=wires.recovery,
                source=wires.events.source,
                address_of=wires.requests.address_of,
                lost=lost,
            )


@asynccontextmanager
async def network_transports(settings: Settings) -> AsyncIterator[NetworkTransports]:
    """The transports of workers whose frontends are elsewhere: one watch reports to all of them who has
    their places.

    Everything that the settings ask for is connected once, so that a mistake in them is reported for no
    engine: raises NatsUnreachable, or ConfigError that names the setting.
    """
    if settings.planes.listen_port:
        raise ConfigError(
            "--listen-port: must be 0: every engine's worker has a port of its own", param="listen_port"
        )
    settings = settled(settings, kv_events=True)  # one place for all of them, whatever their engines publish
    async with (
        open_worker_transports(
            settings, component="backend", has_local_indexer=False, publishes_kv_events=True
        ) as wires,
        holders(wires.discovery) as known,
    ):
        yield NetworkTransports(settings, known)
