"""Servers in processes of their own, and the CPU that each has used."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sides import ROOT

START_TIMEOUT_S = 60.0
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ``engine_us``: CPU that the engines in its own process take a token when alone."""

    name: str
    pid: int
    port: int
    engine_us: float = 0.0

    def cpu_us(self) -> float:
        """CPU that the server's threads and its children's have used so far, in microseconds."""
        return sum(_cpu_ns(pid) for pid in _family(self.pid)) / 1000.0


@contextmanager
def our_server(python: Path, tick_s: float) -> Iterator[Server]:
    """Run ours until the block ends."""
    process = subprocess.Popen(
        [str(python), "-m", "benchmarks.frontend.ours", str(tick_s)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with _ended(process):
        if process.stdout is None:
            raise RuntimeError("the server has no standard output")
        said = json.loads(process.stdout.readline())
        yield Server("ours", process.pid, said["port"], said["engine_us"])


@contextmanager
def gateway(
    name: str, command: Sequence[str], port: int, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """Run a gateway until the block ends. Raises TimeoutError when it does not listen in time."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with _ended(process):
        _wait_listening(name, process, port)
        yield Server(name, process.pid, port)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
