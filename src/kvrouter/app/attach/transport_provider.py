"""Gives an attached worker its transports: those of this process, or network ones."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from kvrouter.app.mock_fleet import MemoryPlanes
from kvrouter.app.router_transports import settled
from kvrouter.app.standby import Holders, holders
from kvrouter.app.worker_transports import open_worker_transports
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import Role
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.records.card_tracker import lost_why
from kvrouter.transports.records.port import Gone, GoneSink
from kvrouter.worker import WorkerTransports

_log = logging.getLogger("kvrouter.worker")


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
        yield self._planes.of_worker()


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
        async with open_engine_transports(self._settings, spec, attached, on_lost) as wires:
            yield replace(wires, lost=lost)


def open_engine_transports(
    settings: Settings, spec: AttachSpec, attached: Attached, on_lost: GoneSink | None
) -> AbstractAsyncContextManager[WorkerTransports]:
    """Connect what the settings ask for a worker of this engine."""
    return open_worker_transports(
        settings,
        component="prefill" if spec.role is Role.PREFILL else "backend",
        has_local_indexer=spec.enable_local_indexer,
        publishes_kv_events=attached.publishes_kv_events,
        on_lost=on_lost,
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
