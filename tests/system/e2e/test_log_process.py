"""The log of a real process: nobody who does not read it holds up a request, and its end loses nothing."""

import asyncio
import fcntl
import json
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvrouter.telemetry import Event, configure_logging, log_event
from kvrouter.telemetry.logs import close_log, lines_lost
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.processes import eventually, free_ports

FLEET = "{version: 1, models: [{name: mock, block_size: 16}], workers: [{name: worker}], speedup: 1000}"
ASKED = {"model": "mock", "prompt": "a b c", "max_tokens": 1}
LIMIT_S = 60.0


class Up:
    """``kvrouter up`` whose standard error is a pipe of 4 KiB."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient, read_end: int) -> None:
        self.process = process
        self.http = http
        self._read_end = read_end

    async def answers(self) -> bool:
        try:
            return (await self.http.post("/v1/completions", json=ASKED)).status_code == 200
        except httpx.ConnectError:
            return False

    async def log(self) -> str:
        """All that it writes to its end."""

        def read() -> str:
            return b"".join(iter(lambda: os.read(self._read_end, 65_536), b"")).decode()

        return await asyncio.to_thread(read)


@asynccontextmanager
async def up(folder: Path) -> AsyncIterator[Up]:
    fleet = folder / "fleet.yaml"
    fleet.write_text(FLEET)
    port = free_ports(1)
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "up", "--fleet", str(fleet), "--http-port", str(port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=write_end,
    )
    os.close(write_end)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as http:
            here = Up(process, http, read_end)
            await eventually(here.answers)
            yield here
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(read_end)


async def test_requests_are_answered_while_nobody_reads_the_log(tmp_path: Path) -> None:
    async with up(tmp_path) as here:
        for _ in range(50):  # some 30 KB of lines
            assert await here.answers()
        here.process.send_signal(signal.SIGTERM)
        log, code = await asyncio.gather(here.log(), here.process.wait())
    assert code == 0
    assert len(re.findall(" request_ended .*status=200", log)) >= 51
    assert log.splitlines()[-1].split()[2] == "stop"


async def test_process_ends_although_nobody_ever_reads_its_log(tmp_path: Path) -> None:
    async with up(tmp_path) as here:
        for _ in range(50):
            assert await here.answers()
        here.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            assert await here.process.wait() == 0


async def test_lost_lines_are_counted_at_once_and_said_later() -> None:
    read_end, write_end = os.pipe()
    logger = logging.getLogger("kvrouter.test")
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as stream:
        configure_logging("info", log_format="json", stream=stream)
        async with mock_server(zoned_fleet()) as here:
            assert (await here.metrics()).value("log_lines_lost_total") == 0
            while not (lost := lines_lost()):
                log_event(logger, Event.STOP)
            assert (await here.metrics()).value("log_lines_lost_total") >= lost
        said = 0
        while not said:
            line = await asyncio.to_thread(reader.readline)
            said = json.loads(line).get("lines", 0)
        assert said >= lost
        reading = asyncio.create_task(asyncio.to_thread(reader.read))
        close_log()
        stream.close()
        await reading


@pytest.mark.parametrize("flag", ["--log-level=nothing", "--http-host=nowhere.invalid"])
async def test_last_line_of_a_failing_command_is_its_error(tmp_path: Path, flag: str) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    failed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "up", "--fleet", str(fleet), flag),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await failed.communicate()
    assert said.decode().splitlines()[-1].startswith("kvrouter: ")
