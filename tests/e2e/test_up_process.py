"""``kvrouter up`` as a process of its own: it says where it listens, drains on SIGTERM, and fails clearly."""

import asyncio
import json
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.support.served import words

FLEET = """
version: 1
models: [{name: mock, block_size: 16}]
workers: [{name: worker, replicas: 2}]
speedup: 4
"""
LIMIT_S = 30.0


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


async def accepts(url: str) -> bool:
    """Whether a new connection is answered; one that comes while the door closes may be taken and dropped."""
    try:
        async with httpx.AsyncClient(base_url=url) as late:
            await late.get("/health")
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
        return False
    return True


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
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


async def test_a_port_that_is_taken_is_one_clear_line() -> None:
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
