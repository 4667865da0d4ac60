"""``kvrouter worker mock``: one mock engine in its own process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from kvrouter.app.fleet_build import load_texts, text_mock_config, topology_env_of
from kvrouter.app.mock_fleet import log_mock_summary
from kvrouter.app.nats_connection import revealed
from kvrouter.app.router_transports import settled
from kvrouter.app.standby import until_free
from kvrouter.app.tls import advertised, tls_of
from kvrouter.app.worker_transports import open_worker_transports
from kvrouter.cli.worker.options import MockFileOptions, MockRunOptions
from kvrouter.cli.worker.worker_process import WorkerProcess, logger
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, WorkerCard, component_of
from kvrouter.engines.mock import MockCluster, TransferSettings
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.fleetfile.fleet_engines import MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import (
    bootstraps,
    mock_engine,
    mock_links,
    numbered_workers,
    worker_card,
)
from kvrouter.fleetfile.one_worker import worker_id_of
from kvrouter.settings.static_endpoint import STATIC_INCARNATION
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.text.source import settled_source
from kvrouter.text.tokenizer import EncodePool
from kvrouter.transports.records.port import GoneSink
from kvrouter.worker import EngineDoor, Worker, WorkerTransports, new_incarnation
from kvrouter.worker.topology import wait_for_topology
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env

FETCHED_LOOK_S = 0.05
"""How often a worker that drains checks whether its KV was fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockWorkerSpec:
    """The worker of a fleet file that a process runs, and values that the file does not have."""

    fleet: FleetFile
    group: WorkerGroup
    worker_id: WorkerId
    run: MockRunOptions
    component: str | None = None

    @classmethod
    def pick(
        cls,
        fleet: FleetFile,
        file_options: MockFileOptions,
        run: MockRunOptions,
        *,
        component: str | None = None,
    ) -> Self:
        """Pick a worker of a group. Its id is in ``file_options``, else its number in a file, else random.
        Raises ConfigError that names the flag.
        """
        group, index, worker_id = file_options.group, file_options.index, file_options.worker_id
        groups = {each.name: each for each in fleet.workers}
        if group is None and len(groups) > 1:
            raise ConfigError(f"--group: must be one of {', '.join(groups)}", param="group")
        found = groups.get(group) if group is not None else fleet.workers[0]
        if found is None:
            raise ConfigError(f"--group: must be one of {', '.join(groups)}, not {group!r}", param="group")
        if not isinstance(found.engine, MockEngineSpec):
            raise ConfigError(
                f"--group: {found.name!r} has no mock engines: its workers are run by "
                f"kvrouter worker {found.engine.kind} --fleet",
                param="group",
            )
        if not 0 <= index < found.n_workers:
            raise ConfigError(
                f"--index: group {found.name!r} has workers 0 to {found.n_workers - 1}, not {index}",
                param="index",
            )
        if worker_id is None and file_options.fleet is not None:
            worker_id = [number for number, each in numbered_workers(fleet) if each is found][index]
        return cls(fleet=fleet, group=found, worker_id=worker_id_of(worker_id), run=run, component=component)


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that serves, and the cluster that its engine runs in."""

    worker: Worker
    cluster: MockCluster

    async def drain(self, limit_s: float) -> bool:
        """Take no new legs; wait up to ``limit_s`` seconds for running legs, and for KV that decode workers
        have not fetched yet. Returns whether all ended.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        await self.worker.begin_drain()
        is_idle = await self.worker.wait_idle(limit_s)
        while is_idle and not self.cluster.idle:
            if loop.time() > until_s:
                break
            await asyncio.sleep(FETCHED_LOOK_S)
        return is_idle and self.cluster.idle


@asynccontextmanager
async def mock_worker(
    settings: Settings,
    spec: MockWorkerSpec,
    environ: Mapping[str, str],
    *,
    on_lost: GoneSink | None = None,
) -> AsyncIterator[RunningWorker]:
    """Run the worker on this event loop: inside, it serves; ``on_lost`` is called when another has its place.

    Raises TopologyUnavailable, ConfigError, or NatsUnreachable.
    """
    fleet, group = spec.fleet, spec.group
    if not spec.run.is_static:
        settings = settled(settings, kv_events=mock_engine(group).kv_events)
    topology = _topology(group, environ)
    domains = group.domains if topology is None else (await wait_for_topology(topology)).domains
    pool = EncodePool()
    text = load_texts(fleet, pool)[ModelName(fleet.model_of(group).mock_name)]
    cluster = _cluster(settings, fleet)
    try:
        planes = settings.planes
        peer = await cluster.listen(planes.listen_host, advertise_host=advertised(settings))
        bootstrap = peer if bootstraps(group) else None
        engine = cluster.add(
            text_mock_config(fleet, group, spec.worker_id, text, bootstrap=bootstrap),
            worker_id=spec.worker_id,
            domains=domains,
        )
        async with open_worker_transports(
            settings,
            component=component_of(group.role, spec.component),
            has_local_indexer=spec.run.enable_local_indexer,
            publishes_kv_events=mock_engine(group).kv_events,
            is_static=spec.run.is_static,
            on_lost=on_lost,
        ) as transports:
            if spec.run.is_standby:
                await until_free(transports.discovery, spec.worker_id)
            worker = Worker(
                engine,
                _card_of(settings, spec, transports, bootstrap),
                discovery=transports.discovery,
                events=transports.events,
                requests=transports.requests,
                recovery=transports.recovery,
                topology=topology,
                engine_tells_events=spec.run.engine_events is None,
            )
            await worker.start()
            try:
                async with _engine_server(settings, spec, worker):
                    yield RunningWorker(worker, cluster)
            finally:
                await worker.stop()
    finally:
        await cluster.close()
        log_mock_summary(cluster)
        pool.close()


def _card_of(
    settings: Settings, spec: MockWorkerSpec, transports: WorkerTransports, bootstrap: Peer | None
) -> WorkerCard:
    """Return the card that the worker publishes."""
    fleet, group, run, planes = spec.fleet, spec.group, spec.run, settings.planes
    incarnation = STATIC_INCARNATION if run.is_static else new_incarnation()
    card = worker_card(
        fleet,
        group,
        spec.worker_id,
        incarnation=incarnation,
        address=transports.requests.address_of(spec.worker_id, incarnation),
        bootstrap=bootstrap,
    )
    return replace(
        card,
        namespace=planes.namespace,
        component=component_of(card.role, spec.component),
        pod=planes.pod_name or "",
        node=planes.node,
        event_source=transports.events.source,
        publishes_kv_events=card.publishes_kv_events and not run.is_static,
        tokenizer=settled_source(fleet.model_of(group).mock_tokenizer),
        runtime_config=replace(card.runtime_config, enable_local_indexer=run.enable_local_indexer),
    )


@asynccontextmanager
async def _engine_server(settings: Settings, spec: MockWorkerSpec, worker: Worker) -> AsyncIterator[None]:
    """Let a custom engine publish its KV events, if that is asked for. Raises ConfigError."""
    if spec.run.engine_events is None:
        yield
        return
    engine_door = EngineDoor(
        worker.publisher,
        address=spec.run.engine_events,
        block_size=worker.card.block_size or BLOCK_SIZE_UNKNOWN,
        token=revealed(settings.planes.plane_token) or "",
        dp_ranks=[rank.dp_rank for rank in worker.card.ranks()],
    )
    await engine_door.start()
    log_event(logger, Event.READY, worker=str(spec.worker_id), address=engine_door.address)
    try:
        yield
    finally:
        await engine_door.stop()


def serve_mock_worker(
    settings: Settings, spec: MockWorkerSpec, environ: Mapping[str, str], *, drain_limit_s: float
) -> int:
    """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

    Returns the exit code, LOST_PLACE when another has the place.
    """
    process = WorkerProcess(settings, spec.worker_id, role=spec.group.role.value, drain_limit_s=drain_limit_s)
    return process.serve(lambda on_lost: mock_worker(settings, spec, environ, on_lost=on_lost))


def _topology(group: WorkerGroup, environ: Mapping[str, str]) -> TopologyEnv | None:
    """The contract of the worker's own environment, else that of its group; None when neither has one."""
    own = parse_topology_env(environ)
    return own if own.enabled else topology_env_of(group)


def _cluster(settings: Settings, fleet: FleetFile) -> MockCluster:
    token = settings.planes.plane_token
    tls = tls_of(settings.planes)
    return MockCluster(
        speedup=fleet.speedup,
        links=mock_links(fleet),
        transfers=TransferSettings(
            token="" if token is None else token.get_secret_value(),
            server_ssl=tls.server,
            client_ssl=tls.client,
        ),
    )
