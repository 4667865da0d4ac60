"""``kvrouter up`` before engines that run already, as a process: it serves, drains, refuses, and gives up."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.testing.engine_publisher import publisher, stored_event, vllm_batch
from tests.testing.processes import ENDS_WITHIN_S, READY_WITHIN_S, eventually, fleet, free_ports
from tests.testing.scripted_engine import JSON, AnswerEnd, ScriptedAnswer, page, scripted_engine

MODEL = "version: 1\nmodels: [{name: tiny, tokenizer: mock}]\n"
CALL = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
STREAM = page("vllm-0.32.0-chat.sse")


async def start(environ: Mapping[str, str], file: Path, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "up", "--fleet", str(file), *arguments),
        env=dict(environ),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )


async def ended(process: Process) -> tuple[int | None, str]:
    """Wait until it ends; return its exit code, and what it wrote since it was last read."""
    assert process.stderr is not None
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            written = (await process.stderr.read()).decode()
            return await process.wait(), written
    finally:
        if process.returncode is None:
            process.kill()


@asynccontextmanager
async def up(file: Path, *arguments: str, doors: int = 1) -> AsyncIterator[tuple[Process, list[str]]]:
    """The command, and the URLs of its front doors, which it tells once they are open."""
    async with fleet() as processes:
        process = await start(processes.environ, file, *arguments)
        assert process.stderr is not None
        try:
            urls: list[str] = []
            async with asyncio.timeout(READY_WITHIN_S):
                while len(urls) < doors:
                    line = (await process.stderr.readline()).decode()
                    assert line, "it ended before it was ready"
                    if " ready " in line and "|" not in line:
                        urls += [f"http://127.0.0.1:{port}" for port in re.findall(r"port=(\d+)", line)]
            yield process, urls
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_up_serves_engines_and_lets_a_running_stream_finish(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    async with scripted_engine() as engine, publisher() as events:
        file.write_text(
            f"{MODEL}workers:\n  - name: a\n    engine:\n      kind: vllm\n      url: {engine.url}\n"
            f"      kv_events_endpoint: {events.at.events}\n"
            f"      kv_events_replay_endpoint: {events.at.replay}\n"
        )
        engine.answers.append(ScriptedAnswer((STREAM,), ends=AnswerEnd.NO_HEADERS))
        async with (
            up(file, "--http-port", "0") as (process, (url,)),
            httpx.AsyncClient(base_url=url, timeout=60.0) as http,
        ):
            assert (await http.get("/ready")).json() == {"status": "ready"}
            await events.publish(vllm_batch(stored_event(1)))

            async def is_known() -> bool:
                (worker,) = (await http.get("/v1/fleet")).json()["workers"]
                return bool(worker["ranks"][0]["index_blocks"] == 1)

            await eventually(is_known)
            running = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
            await engine.called()
            process.send_signal(signal.SIGTERM)

            async def refuses() -> bool:
                async with httpx.AsyncClient(base_url=url, timeout=60.0) as late:
                    return (await late.get("/ready")).status_code == 503

            await eventually(refuses)
            engine.release()
            answer = await running
            assert (answer.status_code, answer.content.endswith(b"data: [DONE]\n\n")) == (200, True)
            code, lines = await ended(process)
    assert (code, "Traceback" in lines) == (0, False)
    assert " drain " in lines


async def test_a_fleet_file_contradicting_its_engine_exits_with_2(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    async with scripted_engine() as engine, fleet() as processes:
        file.write_text(
            "version: 1\nmodels: [{name: tiny, tokenizer: mock, block_size: 16}]\n"
            f"workers: [{{name: a, engine: {{kind: vllm, url: '{engine.url}'}}}}]\n"
        )
        code, lines = await ended(await start(processes.environ, file, "--http-port", "0"))
        reported = [line for line in lines.splitlines() if line.startswith("kvrouter: ")]
        assert len(reported) == 1, lines
        assert reported[0].startswith(
            f"kvrouter: workers[0].engine.url: {engine.url}: models[0].block_size: "
            "the engine's blocks have 32 tokens, not 16"
        )
    assert (code, "Traceback" in lines) == (2, False)


async def test_sigterm_ends_up_while_an_engine_is_being_asked(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    async with scripted_engine() as engine, fleet() as processes:
        engine.pages["/v1/models"] = ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        file.write_text(f"{MODEL}workers: [{{name: a, engine: {{kind: vllm, url: '{engine.url}'}}}}]\n")
        process = await start(processes.environ, file, "--http-port", "0")

        async def is_asked() -> bool:
            return process.returncode is not None or bool(engine.asked["/v1/models"])

        await eventually(is_asked)
        process.terminate()
        code, lines = await ended(process)
    assert (code, "Traceback" in lines) == (0, False), lines


async def test_with_replicas_each_engine_has_a_worker_process(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    async with scripted_engine() as one, scripted_engine() as other:
        urls = f"['{one.url}', '{other.url}']"
        file.write_text(
            f"{MODEL}topology: {{levels: [zone]}}\n"
            "workers:\n  - name: a\n    domains: {zone: a}\n    taints: [gpu]\n"
            f"    engine: {{kind: vllm, urls: {urls}, kv_events: false}}\n"
        )
        for engine in (one, other):
            engine.answers += [ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON)] * 4
        first = str(free_ports())
        async with up(file, "--replicas", "2", "--http-port", first, doors=2) as (process, doors):
            assert process.stderr is not None
            reading = asyncio.create_task(process.stderr.read())
            for url in doors:
                async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:

                    async def are_there(here: httpx.AsyncClient = http) -> bool:
                        workers = (await here.get("/v1/fleet")).json()["workers"]
                        known = [(each["worker_id"], each["domains"], each["taints"]) for each in workers]
                        taints = ["dynamo.topology/zone=a", "gpu"]
                        return known == [(number, {"zone": "a"}, taints) for number in (1, 2)]

                    await eventually(are_there)
                    answer = await http.post("/v1/completions", json=CALL)
                    assert answer.content == page("vllm-0.32.0-completion.json")
            process.terminate()
            async with asyncio.timeout(ENDS_WITHIN_S):
                assert await process.wait() == 0
                assert b"Traceback" not in await reading


async def test_replicas_say_which_engines_have_joined_and_why_others_have_not(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    async with scripted_engine() as engine, scripted_engine() as late:
        await late.stop()
        file.write_text(
            f"{MODEL}workers:\n  - name: a\n"
            f"    engine: {{kind: vllm, urls: ['{engine.url}', '{late.url}'], kv_events: false}}\n"
        )
        async with (
            up(file, "--nats", "--http-port", str(free_ports())) as (process, (url,)),
            httpx.AsyncClient(base_url=url, timeout=60.0) as http,
        ):
            assert process.stderr is not None
            reading = asyncio.create_task(process.stderr.read())

            async def is_named() -> bool:
                (problem,) = (await http.get("/ready")).json()["engine_problems"]
                assert (problem["engine_url"], problem["state"]) == (late.url, "awaited")
                return bool(problem["reason"].startswith("/v1/models: connection refused"))

            await eventually(is_named)
            await line_with(process, f"1 of 2 engines, waiting for {late.url} (connection refused)\n")
            await late.start()
            await line_with(process, f"{late.url} joined: 2 of 2 engines\n")
            process.terminate()
            async with asyncio.timeout(ENDS_WITHIN_S):
                assert await process.wait() == 0
                await reading


async def line_with(process: Process, end: str) -> None:
    """Read standard output up to a line that ends so."""
    assert process.stdout is not None
    async with asyncio.timeout(READY_WITHIN_S):
        while line := (await process.stdout.readline()).decode():
            if line.endswith(end):
                return
    raise AssertionError("it ended")
