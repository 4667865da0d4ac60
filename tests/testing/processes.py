"""Real ``kvrouter`` processes for tests: frontends and workers of one fleet, killed and started again."""

import asyncio
import atexit
import os
import random
import re
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

READY_WITHIN_S = 300.0
"""Far above what a busy machine needs to start a process."""

ENDS_WITHIN_S = 60.0
COMES_WITHIN_S = 300.0
"""Only a test that fails waits as long as this: several processes may start meanwhile on a busy machine."""

SETTINGS = ("DYN_", "KVROUTER_", "NATS_")
CLI = "kvrouter.cli"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Has the first and the last port that the kernel gives connections."""

PROGRESS = re.compile(r"^kvrouter: .*: (\d+%, )?\d+ s(, about \d+ s left)?\n", re.MULTILINE)


async def run_kvrouter(*arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command of ``kvrouter`` to its end; return its exit code and what it printed, without the lines
    that say what it does where that takes over a second.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLI, *arguments),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(READY_WITHIN_S):
        printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, PROGRESS.sub("", printed.decode())


@dataclass
class Running:
    """One process and what it wrote."""

    name: str
    process: Process
    log: Path
    ready: Mapping[str, str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    async def kill(self) -> None:
        """End at once, as by ``kill -9``."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """End in good order; return the exit code."""
        await self._end(signal.SIGTERM)
        code = self.process.returncode
        assert code is not None
        return code

    def pause(self) -> None:
        """Freeze: connections stay open and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def lines(self) -> str:
        return self.log.read_text(errors="replace")

    async def has_logged(self, text: str) -> None:
        """Return once its log has this text: lines are written in batches."""
        await self.found_in_log(re.escape(text))

    async def found_in_log(self, pattern: str) -> re.Match[str]:
        """Return the first match of a pattern once its log has one."""

        async def is_found() -> bool:
            return re.search(pattern, self.lines()) is not None

        await eventually(is_found)
        found = re.search(pattern, self.lines())
        assert found is not None
        return found

    def rss_bytes(self) -> int:
        """Memory that the process holds now."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    async def _end(self, how: signal.Signals) -> None:
        if self.is_running:
            self.process.send_signal(how)
            self.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await self.process.wait()


@dataclass
class Frontend(Running):
    """A front door, and a client for it."""

    http: httpx.AsyncClient = field(default_factory=httpx.AsyncClient)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ready['port']}"

    async def fleet(self) -> Any:
        """``GET /v1/fleet``."""
        return (await self.http.get("/v1/fleet")).raise_for_status().json()

    async def serves(self, workers: int) -> bool:
        """Whether it knows so many workers, each may take requests, and their models' tokenizers are here: a
        model whose tokenizer is still being read has workers already, and its calls are answered 503.
        """
        known = (await self.fleet())["workers"]
        if len(known) != workers or not all(each["alive"] and not each["draining"] for each in known):
            return False
        return not await self.models_without_tokenizer(known)

    async def models_without_tokenizer(self, workers: Sequence[Mapping[str, Any]]) -> set[str]:
        """The models of these workers that cannot be asked for yet."""
        listed = (await self.http.get("/v1/models")).raise_for_status().json()["data"]
        return {worker["model"] for worker in workers} - {model["id"] for model in listed}

    async def metrics(self) -> "Metrics":
        """``GET /metrics``."""
        return Metrics((await self.http.get("/metrics")).raise_for_status().text)


class Metrics:
    """A page of metrics, to be asked."""

    _LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)
    _LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self, text: str) -> None:
        self.samples = [
            (name, dict(self._LABEL.findall(labels)), float(value))
            for name, labels, value in self._LINE.findall(text)
        ]

    def of(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Every sample of a metric, with its labels."""
        return [(labels, value) for found, labels, value in self.samples if found == f"kvrouter_{name}"]

    def total(self, name: str, **wanted: str) -> float:
        """The sum over all samples with these labels."""
        return sum(value for labels, value in self.of(name) if wanted.items() <= labels.items())


class Fleet:
    """The processes of one namespace. ``environ`` are the settings that all of them share; each may have
    ``files_max`` files open.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], *, files_max: int | None = None) -> None:
        self.folder = folder
        self._shell = () if files_max is None else ("sh", "-c", 'ulimit -n "$0" && exec "$@"', str(files_max))
        self.namespace = f"test-{uuid4().hex[:12]}"
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("DYN_", "KVROUTER_"))
            },
            "DYN_NAMESPACE": self.namespace,
            "DYN_DISCOVERY_BACKEND": "file",
            "KVROUTER_DISCOVERY_DIR": str(folder / "discovery"),
            **environ,
        }
        self.processes: list[Running] = []
        self._starts = 0

    async def worker(
        self, *arguments: str, engine: str = "mock", environ: Mapping[str, str] | None = None
    ) -> Running:
        """Start a worker and return once it serves."""
        running = await self._start("worker", ("worker", engine, *arguments), environ, CLI)
        self.processes.append(running)
        return running

    async def frontend(
        self, *arguments: str, environ: Mapping[str, str] | None = None, module: str = CLI
    ) -> Frontend:
        """Start a frontend and return once its door is open; workers it may not have found yet."""
        return await self.door("frontend", *arguments, environ=environ, module=module)

    async def router(self, *arguments: str, environ: Mapping[str, str] | None = None) -> Frontend:
        """Start a standalone router, as :meth:`frontend` does a frontend."""
        return await self.door("router", *arguments, environ=environ)

    async def door(
        self, command: str, *arguments: str, environ: Mapping[str, str] | None = None, module: str = CLI
    ) -> Frontend:
        """Start a command that opens a front door, as :meth:`frontend` does."""
        started = await self._start(command, (command, "--http-port", "0", *arguments), environ, module)
        running = Frontend(started.name, started.process, started.log, started.ready)
        running.http = httpx.AsyncClient(base_url=running.url, timeout=COMES_WITHIN_S)
        self.processes.append(running)
        return running

    async def stop(self) -> None:
        """End whatever still runs."""
        for running in self.processes:
            if running.is_running:
                await running.kill()
            if isinstance(running, Frontend):
                await running.http.aclose()

    def logs(self) -> str:
        """The last lines of every process, for a test that failed."""
        return "\n".join(f"== {each.name}\n{each.lines()[-4000:]}" for each in self.processes)

    async def _start(
        self, kind: str, arguments: tuple[str, ...], environ: Mapping[str, str] | None, module: str
    ) -> Running:
        self._starts += 1
        name = f"{kind}-{self._starts}"
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(*self._shell, sys.executable, "-m", module, *arguments),
                env={**self.environ, **(environ or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            return Running(name, process, log, await _ready(process, log))
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise


async def _ready(process: Process, log: Path) -> dict[str, str]:
    """The fields of the process's ``ready`` line. Processes tell nobody but their log, so it is looked at."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + READY_WITHIN_S
    while True:
        has_ended = process.returncode is not None
        lines = _read(log)
        reported = re.search(r" ready (.*)", lines)
        if reported is not None:
            return dict(re.findall(r"(\w+)=(\S+)", reported[1]))
        assert not has_ended, f"it ended: {lines[-4000:]}"
        assert loop.time() < until_s, f"not ready: {lines[-4000:]}"
        await asyncio.sleep(0.02)


def _read(log: Path) -> str:
    return log.read_text(errors="replace")


@asynccontextmanager
async def fleet(
    environ: Mapping[str, str] | None = None, *, files_max: int | None = None
) -> AsyncIterator[Fleet]:
    """A fleet to be, and its end; its logs are shown when the test fails."""
    with tempfile.TemporaryDirectory(prefix="kvrouter-test-") as folder:
        processes = Fleet(Path(folder), environ or {}, files_max=files_max)
        try:
            yield processes
        except BaseException:
            print(processes.logs())
            raise
        finally:
            await processes.stop()


async def eventually(check: Any, *, limit_s: float = COMES_WITHIN_S) -> None:
    """Wait until ``await check()`` is true; other processes cannot be awaited, so they are asked again."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    while not await check():
        assert loop.time() < until_s, "it did not come true"
        await asyncio.sleep(0.05)


def not_ephemeral(ports: Sequence[int], n: int = 1) -> Sequence[int]:
    """Those of the ports that begin ``n`` which the kernel gives no connection: one of those might be taken
    before a server listens on it. All ports, where the kernel gives connections some of each.
    """
    first, last = (int(port) for port in EPHEMERAL_PORTS.read_text().split())
    return [port for port in ports if port + n <= first or port > last] or ports


def free_ports(n: int = 2) -> int:
    """The first of ``n`` TCP ports in a row that are free now; see :func:`not_ephemeral`.

    No other call returns one of them while this process of tests lives, here or in another: it keeps the UDP
    ports of these numbers, which nobody uses.
    """
    firsts = not_ephemeral(range(12_000, 19_000), n)
    for _ in range(100):
        first = random.choice(firsts)
        with ExitStack() as taken:
            try:
                for port in range(first, first + n):
                    taken.enter_context(socket.socket(type=socket.SOCK_DGRAM)).bind(("127.0.0.1", port))
                    with socket.socket() as sock:
                        sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            _reserved.enter_context(taken.pop_all())
            return first
    raise AssertionError("no free ports")


_reserved = ExitStack()
"""Sockets that are closed with this process."""

atexit.register(_reserved.close)


def default_signals() -> None:
    """Undo ignored signals in a new process, before its program: who runs tests may ignore hang-ups, and
    interrupts if that is in the background."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
