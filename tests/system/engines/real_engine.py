"""A real engine's server as a process of its own, on CPU, with the tiny model: what is alike for all."""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx

from tests.system.engines.install import VARIABLE, engines_dir
from tests.testing.processes import free_ports

READY_WITHIN_S = 900.0
"""Far above what it takes while others use the cores, as engines that serve."""

ENDS_WITHIN_S = 300.0
GRACE_S = 30.0
"""How long Kubernetes lets a pod end before it is killed."""

MODEL = "tiny"


class RealEngine(ABC):
    """One server. ``core`` pins it: its threads poll, and two on one core starve each other. None: they share
    the cores with other engines, so they should not poll.

    ``host`` is where it is reached, and ``prefix`` what runs its command there, in a namespace for example.
    """

    kind: ClassVar[str]
    """What ``kvrouter worker`` calls it."""

    block_size: ClassVar[int]
    n_ports: ClassVar[int]

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        core: int | None,
        host: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.host = host
        self._prefix = prefix
        self._folder = folder
        self._core = core
        first = free_ports(self.n_ports)
        self._ports = range(first, first + self.n_ports)
        self._process: Process | None = None
        self.http = httpx.AsyncClient(base_url=self.url, timeout=120.0)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self._ports[0]}"

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @abstractmethod
    async def start(self) -> None:
        """Start it and return once it answers."""

    @abstractmethod
    async def forget(self) -> None:
        """Empty its cache, and let it tell so."""

    async def ask(self, path: str, **body: object) -> Any:
        """Send a call that is not streamed; return its answer."""
        answer = await self.http.post(path, json={"model": MODEL, **body})
        return answer.raise_for_status().json()

    async def complete(self, prompt: str | list[int], **body: object) -> Any:
        """A greedy completion."""
        return await self.ask("/v1/completions", prompt=prompt, temperature=0, **body)

    async def kill(self) -> None:
        """End all of its processes at once, as by ``kill -9``."""
        await self._end(signal.SIGKILL)

    async def terminate(self) -> None:
        """Ask its first process to end, as a container's runtime does; kill what is left after half a
        minute.
        """
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._process.wait()
        await self.kill()

    async def stop(self) -> None:
        """End it in good order, and what remains of it."""
        await self._end(signal.SIGTERM)
        await self.http.aclose()

    async def _run(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        home = engines_dir()
        assert (home / "model.installed").is_file(), f"make test-engines installs the engines ({VARIABLE})"
        pinned = () if self._core is None else ("taskset", "--cpu-list", str(self._core))
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*self._prefix, *pinned, *command),
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        async with asyncio.timeout(READY_WITHIN_S):
            while not await self._answers():
                assert self._process.returncode is None, self.log.read_text(errors="replace")[-4000:]
                await asyncio.sleep(0.25)  # nothing but its answer tells that it is there

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        with suppress(ProcessLookupError):  # its first process may have ended, and others of it not
            os.killpg(process.pid, how)
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
