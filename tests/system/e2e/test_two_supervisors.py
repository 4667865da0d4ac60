"""Two commands that run the workers of one fleet: the newer has their places, the older waits for them."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.testing.processes import ENDS_WITHIN_S, READY_WITHIN_S, fleet, free_ports

FLEET = "version: 1\nmodels: [{name: mock}]\nworkers: [{name: w, replicas: 1}]\nspeedup: 20\n"


class _Up:
    """``kvrouter up`` with two frontends and a worker, and what it said."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.text = ""

    async def says(self, pattern: str, *, times: int = 1) -> None:
        """Read until what it said has ``pattern`` so often."""
        assert self.process.stderr is not None
        async with asyncio.timeout(READY_WITHIN_S):
            while len(re.findall(pattern, self.text)) < times:
                line = (await self.process.stderr.readline()).decode()
                assert line, f"it ended: {self.text}"
                self.text += line

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        async with asyncio.timeout(ENDS_WITHIN_S):
            self.text += (await self.process.stderr.read()).decode()
            return await self.process.wait()


@asynccontextmanager
async def up(environ: Mapping[str, str], file: Path) -> AsyncIterator[_Up]:
    arguments = ("--fleet", str(file), "--replicas", "2", "--http-port", str(free_ports()))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "up", *arguments), env=environ, stderr=PIPE
    )
    try:
        yield _Up(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_newer_supervisor_takes_the_workers_places_until_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    async with fleet() as processes, up(processes.environ, file) as older:
        await older.says(r"worker w/0 \| .* ready ")
        async with up(processes.environ, file) as newer:
            await newer.says(r"worker w/0 \| .* ready ")
            await older.says("worker_replaced")
            await older.says("process_ended .*exit_code=3 .*to wait until its place is free")
            await older.says(r"worker w/0 \| .* worker_standby .*it serves at ")
            assert await newer.stop() == 0
            assert "worker_replaced" not in newer.text
        await older.says(r"worker w/0 \| .* ready ", times=2)
        assert await older.stop() == 0
        assert "Traceback" not in older.text + newer.text


async def test_a_standby_worker_ends_on_sigterm(tmp_path: Path) -> None:
    async with fleet() as processes:
        await processes.worker("--worker-id", "7")
        waiting = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.cli", "worker", "mock", "--worker-id", "7", "--standby"),
            env=processes.environ,
            stderr=PIPE,
        )
        assert waiting.stderr is not None
        async with asyncio.timeout(READY_WITHIN_S):
            while b"worker_standby" not in (line := await waiting.stderr.readline()):
                assert line, "it ended"
            waiting.send_signal(signal.SIGTERM)
            said = await waiting.stderr.read()
            assert await waiting.wait() == 0
        assert b"Traceback" not in said
