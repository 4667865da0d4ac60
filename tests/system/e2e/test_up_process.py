"""``kvrouter up`` as a process of its own: it says where it listens, drains on SIGTERM, and fails clearly."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

import httpx

from tests.testing.mock_server import words

FLEET = """
version: 1
models: [{name: mock, block_size: 16}]
workers: [{name: worker, replicas: 2}]
speedup: 4
"""
LIMIT_S = 90.0


async def start(*arguments: str, environ: Mapping[str, str] | None = None) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrouter.cli",
        "up",
        *arguments,
        stdout=PIPE,
        stderr=PIPE,
        env=None if environ is None else dict(environ),
    )


@asynccontextmanager
async def running(fleet: Path) -> AsyncIterator[tuple[Process, str]]:
    """The process, and its address, which it tells once it is ready."""
    process = await start("--fleet", str(fleet), "--http-port", "0")
    assert process.stderr is not None
    try:
        port = None
        while port is None:
            line = (await asyncio.wait_for(process.stderr.readline(), LIMIT_S)).decode()
            assert line, "it ended before it was ready"
            if "ready" in line:
                port = re.search(r"port=(\d+)", line)
        yield process, f"http://127.0.0.1:{port[1]}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_up_prints_the_served_fleet_and_a_working_example_call(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "version: 1\nmodels: [{name: mock, block_size: 16}]\ntopology: {levels: [zone]}\n"
        "workers:\n  - {name: a, replicas: 2, domains: {zone: a}}\n  - {name: b, domains: {zone: b}}\n"
    )
    async with running(fleet) as (process, url):
        assert process.stdout is not None
        lines = [(await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode() for _ in range(3)]
        version = metadata.version("kvrouter")
        assert (
            lines[0] == f"kvrouter {version} serves mock at {url}/v1: 3 workers (2 in zone a, 1 in zone b)\n"
        )
        assert f"{url}/ui" in lines[1]
        assert "\x1b" not in "".join(lines)
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            assert (await client.get("/ui")).status_code == 200
        call = shlex.split(lines[2].removeprefix("Try it: "))
        tried = await asyncio.create_subprocess_exec(*call, stdout=PIPE, stderr=PIPE)
        answer, _ = await tried.communicate()
        assert json.loads(answer)["object"] == "chat.completion"


async def test_up_shows_one_table_of_workers_on_a_terminal(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "kvrouter.cli", "up", "--fleet", str(fleet), "--http-port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read = b""
    try:
        while not (b"2 of 2 feeds that were recovering are live" in read and b" ready " in read):
            read += await asyncio.wait_for(asyncio.to_thread(os.read, ours, 65_536), LIMIT_S)
        shown = read.decode(errors="replace")
        assert "worker_joined" not in shown
        assert "feed_state" not in shown
        lines = [line.split() for line in shown.splitlines()]
        assert ["mock", "both", "recovering", "2", "1–2"] in lines
        assert any("ready" in line for line in lines)
        assert shown.index("1–2") < shown.index("Try it: "), "the first screen comes after the table"
    finally:
        process.kill()
        await process.communicate()
        os.close(ours)


async def test_the_json_log_format_leaves_stdout_empty(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    process = await start("--fleet", str(fleet), "--http-port", "0", "--log-format", "json")
    assert process.stderr is not None
    while b'"ready"' not in await asyncio.wait_for(process.stderr.readline(), LIMIT_S):
        pass
    process.send_signal(signal.SIGTERM)
    out, _ = await process.communicate()
    assert out == b""


async def accepts(url: str) -> bool:
    """Whether a new connection is answered; one that comes while the door closes may be taken and dropped."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as late:
            await late.get("/health")
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
        return False
    return True


async def test_sigterm_finishes_running_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    async with (
        running(fleet) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http,
    ):
        body = {"model": "mock", "prompt": words(), "max_tokens": 400, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            events = [await anext(lines)]
            process.send_signal(signal.SIGTERM)
            while await accepts(url):
                pass  # the signal is on its way
            events += [line async for line in lines]
        texts = [json.loads(line[6:]) for line in events if line and line != "data: [DONE]"]
        assert "data: [DONE]" in events
        assert texts[-1]["choices"][0]["finish_reason"] == "length"
        said = "".join(event["choices"][0]["text"] for event in texts)
        assert len(said.split()) == 400
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0


async def test_a_taken_port_is_one_error_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--http-port", str(port))
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 1
    assert out == b""
    reported = [line for line in err.decode().splitlines() if line.startswith("kvrouter: ")]
    assert len(reported) == 1
    assert str(port) in reported[0]
    assert "Traceback" not in err.decode()
