"""Mock fleet: a fleet file's mock engines with their workers in this process."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvrouter.app.fleet_build import load_texts, text_mock_config, topology_env_of
from kvrouter.app.text_models import encode_pool
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.engines.mock import MockCluster, MockEngineHandle
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import BOOTSTRAP_PORT, bootstraps, mock_links, mock_workers, worker_card
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.worker import Worker, WorkerTransports, new_incarnation
from kvrouter.worker.topology import wait_for_topology
from kvrouter.worker.topology_env import TopologyEnv

_log = logging.getLogger("kvrouter.engines.mock_engine")


def log_mock_summary(cluster: MockCluster) -> None:
    """Log the mock engines' summary, unless it is empty."""
    summary = mock_summary(cluster)
    if summary:
        log_event(_log, Event.MOCK_ENDED, detail=summary)


def mock_summary(cluster: MockCluster) -> str:
    """Summarize the engines' own counts: KV transfers between domains, pulls by and from other processes,
    refused connections, and the time by which the engines' clock lagged on a slow machine; "" without any.
    """
    counts = cluster.transfer_counts()
    lines = [
        f"KV from {pair.src_domain or 'no domain'} to {pair.dst_domain or 'no domain'}: "
        f"{carried.transfers} transfers, {carried.arrived_bytes} bytes"
        for pair, carried in sorted(cluster.carried().items())
    ]
    if counts.outgoing:
        lines.append(f"{counts.outgoing_done} of {counts.outgoing} pulls from other processes done")
    if counts.incoming:
        lines.append(f"{counts.incoming_done} of {counts.incoming} pulls by other processes done")
    lines += [f"{n} connections refused: {why}" for why, n in sorted(counts.refused.items())]
    if cluster.slipped_s:
        lines.append(f"the engines' clock stood still for {cluster.slipped_s:.3f} s")
    return "; ".join(lines)


@dataclass(frozen=True, slots=True)
class ProcessTransports:
    """The in-memory transports of the workers of one process."""

    discovery: MemoryDiscovery
    events: MemoryEventTransport
    requests: MemoryRequestTransport

    def of_worker(self) -> WorkerTransports:
        """The transports of one worker; no other process can replace it."""
        return WorkerTransports(self.discovery, self.requests, self.events, self.events)


class MockFleet:
    """All mock workers of a fleet file, as an async context manager: inside, they serve."""

    def __init__(self, fleet: FleetFile) -> None:
        self.fleet = fleet
        self.discovery = MemoryDiscovery()
        self.events = MemoryEventTransport()
        self.requests = MemoryRequestTransport()
        self.encode_pool = encode_pool(fleet.frontend)
        self.texts = load_texts(fleet, self.encode_pool)
        self.cluster = MockCluster(speedup=fleet.speedup, links=mock_links(fleet))
        self.workers: dict[WorkerId, Worker] = {}
        self._engines: dict[WorkerId, MockEngineHandle] = {}

    @property
    def transports(self) -> ProcessTransports:
        """The fleet's transports, for other workers that join it."""
        return ProcessTransports(self.discovery, self.events, self.requests)

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as starting:
                for worker_id, group in mock_workers(self.fleet):
                    starting.create_task(self._start(worker_id, group))
        except* KvrouterError as group_error:
            await self._stop()
            raise group_error.exceptions[0] from None
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop()
        await self.requests.close()
        log_mock_summary(self.cluster)
        self.encode_pool.close()

    async def _start(self, worker_id: WorkerId, group: WorkerGroup) -> None:
        topology = topology_env_of(group)
        domains = group.domains if topology is None else (await wait_for_topology(topology)).domains
        worker = self._make_worker(worker_id, group, domains, topology)
        await worker.start()
        self.workers[worker_id] = worker

    async def kill(self, worker_id: WorkerId, why: str = "killed") -> None:
        """Kill a worker without draining, and withdraw its card, as discovery would after its lease."""
        worker = self.workers.pop(worker_id)
        self._engines[worker_id].kill(why)
        worker.die(why)
        await self.discovery.withdraw(worker_id, worker.card.incarnation)

    def check_integrity(self) -> list[str]:
        """Return violations of the engines' accounting; idle engines must hold no blocks."""
        return self.cluster.check_integrity()

    def _make_worker(
        self,
        worker_id: WorkerId,
        group: WorkerGroup,
        domains: Mapping[str, str],
        topology: TopologyEnv | None,
    ) -> Worker:
        model = self.fleet.model_of(group)
        bootstrap = Peer(f"mock-{worker_id}", BOOTSTRAP_PORT) if bootstraps(group) else None
        incarnation = new_incarnation()
        config = text_mock_config(
            self.fleet, group, worker_id, self.texts[ModelName(model.mock_name)], bootstrap=bootstrap
        )
        engine = self._engines[worker_id] = self.cluster.add(config, worker_id=worker_id, domains=domains)
        return Worker(
            engine,
            worker_card(
                self.fleet,
                group,
                worker_id,
                incarnation=incarnation,
                address=memory_address(worker_id, incarnation),
                bootstrap=bootstrap,
            ),
            discovery=self.transports.discovery,
            events=self.transports.events,
            requests=self.transports.requests,
            recovery=self.transports.events,
            topology=topology,
        )
