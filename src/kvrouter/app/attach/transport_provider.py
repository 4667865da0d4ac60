"""Transport providers: give an attached worker its transports, in memory or over the network."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from kvrouter.app.mock_fleet import ProcessTransports
from kvrouter.app.router_transports import settled
from kvrouter.app.standby import Holders, holders
from kvrouter.app.worker_transports import open_worker_transports
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import component_of
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.records.card_tracker import lost_why
from kvrouter.transports.records.port import Gone, GoneSink
from kvrouter.worker import WorkerTransports

_log = logging.getLogger("kvrouter.worker")


class TransportProvider(Protocol):
    """Provides the transports of all workers of a process."""

    def open(self, spec: AttachSpec, attached: Attached) -> AbstractAsyncContextManager[WorkerTransports]:
        """Open the transports of this engine's worker. Raises KvrouterError where they are not available."""


class MemoryTransports:
    """In-memory transports: the frontend is in this process."""

    def __init__(self, transports: ProcessTransports) -> None:
        self._transports = transports

    @asynccontextmanager
    async def open(self, _spec: AttachSpec, _attached: Attached) -> AsyncIterator[WorkerTransports]:
        """Return the shared transports; no other process can replace the worker."""
        yield self._transports.of_worker()


class NetworkTransports:
    """Network transports: each worker has its own port and registers once its id is free."""

    def __init__(self, settings: Settings, known: Holders) -> None:
        self._settings = settings
        self._known = known

    @asynccontextmanager
    async def open(self, spec: AttachSpec, attached: Attached) -> AsyncIterator[WorkerTransports]:
        """Wait until the worker's id is free, and connect what the settings require."""
        lost = asyncio.Event()

        def on_lost(worker_id: WorkerId, _: Epoch, how: Gone) -> None:
            log_event(_log, Event.WORKER_REPLACED, worker=str(worker_id), reason=f"{lost_why(how)}: waiting")
            lost.set()

        await self._known.until_free(spec.worker_id)
        async with open_engine_transports(self._settings, spec, attached, on_lost) as transports:
            yield replace(transports, lost=lost)


def open_engine_transports(
    settings: Settings, spec: AttachSpec, attached: Attached, on_lost: GoneSink | None
) -> AbstractAsyncContextManager[WorkerTransports]:
    """Connect what the settings require for a worker of this engine."""
    return open_worker_transports(
        settings,
        component=component_of(spec.role, spec.component),
        has_local_indexer=spec.enable_local_indexer,
        publishes_kv_events=attached.publishes_kv_events,
        on_lost=on_lost,
    )


@asynccontextmanager
async def network_transports(settings: Settings) -> AsyncIterator[NetworkTransports]:
    """Provide network transports for workers; one watch of discovery shows all of them whose ids are taken.

    Everything that the settings require is connected once, so that a wrong setting is raised here and not
    reported for an engine: raises NatsUnreachable, or ConfigError that names the setting.
    """
    if settings.planes.listen_port:
        raise ConfigError(
            "--listen-port: must be 0: every engine's worker has a port of its own", param="listen_port"
        )
    settings = settled(settings, kv_events=True)  # one discovery for every engine
    async with (
        open_worker_transports(
            settings, component="backend", has_local_indexer=False, publishes_kv_events=True
        ) as transports,
        holders(transports.discovery) as known,
    ):
        yield NetworkTransports(settings, known)
