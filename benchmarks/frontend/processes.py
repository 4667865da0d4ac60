"""Servers in processes of their own, and the CPU that each has used."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sides import ROOT
from tests.testing.processes import free_ports

START_TIMEOUT_S = 60.0
IDLE_S = 3.0
"""How long a server is watched while nobody asks it anything."""

_PROC = Path("/proc")
_SETTINGS = ("DYN_", "KVROUTER_", "NATS_")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ``idle_us_per_s``: CPU that it takes a second when nobody asks it anything."""

    name: str
    pid: int
    port: int
    idle_us_per_s: float = 0.0

    def cpu_us(self) -> float:
        """CPU that the server's threads and its children's have used so far, in microseconds."""
        return sum(_cpu_ns(pid) for pid in _family(self.pid)) / 1000.0

    def rss_bytes(self) -> int:
        """Resident memory of the server's own process."""
        for line in (_PROC / str(self.pid) / "status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"{self.name}: no VmRSS")

    def busy_clock(self) -> Callable[[], float]:
        """Return a clock of the CPU that requests take, in microseconds: what it takes idle is deducted."""
        began_s, began_us = time.monotonic(), self.cpu_us()
        return lambda: self.cpu_us() - began_us - self.idle_us_per_s * (time.monotonic() - began_s)

    def watch_idle(self, seconds: float = IDLE_S) -> float:
        """Return the CPU that it takes a second now; nobody may ask it anything meanwhile."""
        before_us = self.cpu_us()
        began_s = time.monotonic()
        time.sleep(seconds)
        return (self.cpu_us() - before_us) / (time.monotonic() - began_s)


@contextmanager
def our_frontend(python: Path, discovery: Path, *flags: str) -> Iterator[Server]:
    """Run ``kvrouter frontend`` until the block ends; ``discovery`` is the folder of its fleet."""
    port = free_ports(1)
    environ = environ_of(discovery)
    command = (str(python), "-m", "kvrouter.cli", "frontend", "--http-port", str(port), *flags)
    with _listening("ours", command, port, environ) as server:
        yield server


def environ_of(discovery: Path) -> dict[str, str]:
    """Return the environment of a process whose fleet is in the folder ``discovery``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return environ | {"DYN_DISCOVERY_BACKEND": "file", "KVROUTER_DISCOVERY_DIR": str(discovery)}


@contextmanager
def gateway(
    name: str, command: Sequence[str], port: int, environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a gateway until the block ends. Raises TimeoutError when it does not listen in time."""
    with _listening(name, command, port, {**os.environ, **(environ or {})}) as server:
        yield server


@contextmanager
def in_background(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Run a process until the block ends; who depends on it sees whether it serves."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with _ended(process):
        yield


@contextmanager
def module(name: str, *arguments: str) -> Iterator[int]:
    """Run a module of ours that says its port, until the block ends; return the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", name, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with _ended(process):
        if process.stdout is None:
            raise RuntimeError(f"{name} has no standard output")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} ended before it served")
        port: int = json.loads(line)["port"]
        yield port


async def say_and_wait(said: dict[str, int]) -> None:
    """The other end of :func:`module`: say where it serves, and wait for the end of standard input."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def _listening(name: str, command: Sequence[str], port: int, environ: dict[str, str]) -> Iterator[Server]:
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with _ended(process):
        _wait_listening(name, process, port)
        yield Server(name, process.pid, port)


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _wait_listening(name: str, process: "subprocess.Popen[bytes]", port: int) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with {process.returncode} before it listened")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{name} does not listen on port {port} after {START_TIMEOUT_S:g} s")


def _family(pid: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family.extend(child for child, parent in parents.items() if parent == member)
    return family


def _cpu_ns(pid: int) -> int:
    used = 0
    for task in (_PROC / str(pid) / "task").iterdir():
        with suppress(OSError):  # a thread that ended meanwhile
            used += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return used
