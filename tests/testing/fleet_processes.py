"""The processes of one fleet file: every worker by its number, killed and started again as a test likes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.settings.problems import read_document
from tests.testing.fleet_checks import Prompts, wait_until_consistent
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Fleet, Frontend, Running, eventually, fleet


@dataclass(frozen=True)
class FleetTransports:
    """``name`` says discovery, requests, events. Every process gets ``environ``, workers get ``flags``."""

    name: str
    environ: Mapping[str, str]
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


FILE_TCP_ZMQ = FleetTransports("file-tcp-zmq", {})
NATS_TCP_JETSTREAM_SYNC = FleetTransports(
    "nats-tcp-jetstream-sync", {"DYN_DISCOVERY_BACKEND": "nats", "DYN_ROUTER_REPLICA_SYNC": "true"}
)
NATS_HTTP_JETSTREAM = FleetTransports(
    "nats-http-jetstream", {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "http"}
)
NATS_NATS_CORE = FleetTransports(
    "nats-nats-core",
    {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "nats"},
    ("--enable-local-indexer",),
)


@dataclass
class FleetProcesses:
    """Workers by worker id, and frontends, each with a name that it keeps when it is started again."""

    processes: Fleet
    file: Path
    flags: tuple[str, ...]
    """What every worker is started with."""

    module: str
    """What frontends are: the command line, or something that a test puts around it."""

    environs: Mapping[int, Mapping[str, str]]
    """Settings of single workers, by worker id."""

    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Worker id → its group in the file, and its number there."""

    workers: dict[int, Running] = field(default_factory=dict)
    frontends: list[Frontend] = field(default_factory=list)

    @classmethod
    async def begin(
        cls,
        processes: Fleet,
        text: str,
        *,
        flags: tuple[str, ...] = (),
        frontends: int = 2,
        module: str = "kvrouter.cli",
        environs: Mapping[int, Mapping[str, str]] | None = None,
    ) -> "FleetProcesses":
        """Start every process, and return once every frontend knows every worker."""
        file = processes.folder / "fleet.yaml"
        file.write_text(text)
        fleet = cls(processes, file, flags, module, environs or {})
        indexes: dict[str, int] = {}
        for worker_id, group in numbered_workers(load_fleet(read_document(file)).fleet):
            index = indexes.get(group.name, 0)
            indexes[group.name] = index + 1
            fleet.places[worker_id] = (group.name, index)
        await asyncio.gather(
            *(fleet.start_worker(worker_id) for worker_id in fleet.places),
            *(fleet.start_frontend(f"replica-{number}") for number in range(frontends)),
        )
        await fleet.is_well()
        return fleet

    def group(self, name: str) -> list[int]:
        """The worker ids of a group."""
        return [worker_id for worker_id, (group, _) in self.places.items() if group == name]

    async def start_worker(self, worker_id: int) -> Running:
        """Start a worker of the file, or a new incarnation of it."""
        group, index = self.places[worker_id]
        place = ("--fleet", str(self.file), "--group", group, "--index", str(index))
        self.workers[worker_id] = await self.processes.worker(
            *place, *self.flags, environ=self.environs.get(worker_id)
        )
        return self.workers[worker_id]

    async def is_known(self, worker_id: int) -> None:
        """Return once every frontend gives requests to the worker as it runs now."""
        address = self.workers[worker_id].ready["address"]

        async def knows(frontend: Frontend) -> bool:
            workers = (await frontend.fleet())["workers"]
            return any(
                each["address"] == address and each["alive"] and not each["draining"] for each in workers
            )

        for frontend in self.frontends:
            await eventually(partial(knows, frontend))

    async def start_frontend(self, name: str, environ: dict[str, str] | None = None) -> Frontend:
        """Start a frontend, or one of the same replica name again."""
        flags = ("--config", str(self.file), "--router-replica-name", name)
        frontend = await self.processes.frontend(*flags, environ=environ, module=self.module)
        self.frontends.append(frontend)
        return frontend

    async def is_well(self, asked: Prompts = ()) -> None:
        """Wait until all that must hold of a quiet fleet does; ``asked`` were answered."""
        running = [each for each in self.frontends if each.is_running]
        await wait_until_consistent(self.processes, running, workers=len(self.places), asked=asked)


@asynccontextmanager
async def fleet_processes(
    text: str,
    planes: FleetTransports,
    nats: NatsServer,
    *,
    environ: Mapping[str, str] | None = None,
    environs: Mapping[int, Mapping[str, str]] | None = None,
    module: str = "kvrouter.cli",
) -> AsyncIterator[FleetProcesses]:
    """Two frontends and every worker of a fleet file, over these planes, whose logs have each decision;
    ``environ`` goes before theirs, and ``environs`` are settings of single workers.
    """
    settings = {
        "NATS_SERVER": nats.url,
        "KVROUTER_LOG_LEVEL": "debug",
        **planes.environ,
        **(environ or {}),
    }
    async with fleet(settings) as processes:
        yield await FleetProcesses.begin(
            processes, text, flags=planes.flags, module=module, environs=environs
        )
