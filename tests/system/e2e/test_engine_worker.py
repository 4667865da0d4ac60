"""``kvrouter worker vllm`` and ``worker sglang`` as processes of their own, next to a scripted engine."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.testing.engine_publisher import publisher, stored_event, vllm_batch
from tests.testing.processes import ENDS_WITHIN_S, Fleet, Frontend, eventually, fleet, free_ports
from tests.testing.scripted_engine import SGLANG_PAGES, VLLM_PAGES, AnswerEnd, ScriptedAnswer, scripted_engine

SETTINGS = {"DYN_EVENT_PLANE": "zmq"}


async def workers(frontend: Frontend) -> list[Mapping[str, Any]]:
    return list((await frontend.fleet())["workers"])


@pytest.mark.parametrize(
    ("kind", "pages", "block_size", "n_blocks"),
    [("vllm", VLLM_PAGES, 32, 200), ("sglang", SGLANG_PAGES, 16, 64)],
)
async def test_an_engine_worker_joins_pauses_while_silent_and_leaves(
    kind: str, pages: Mapping[str, str], block_size: int, n_blocks: int
) -> None:
    async with scripted_engine(pages) as scripted, publisher() as engine, fleet(SETTINGS) as processes:
        assert engine.at.replay is not None
        flags = ("--url", scripted.url, "--worker-id", "7", "--domain", "zone=a")
        at = ("--kv-events", engine.at.events, "--kv-events-replay", engine.at.replay)
        running, frontend = await asyncio.gather(
            processes.worker(*flags, *at, engine=kind), processes.frontend()
        )
        root = stored_event(1, block_size=block_size)
        await engine.publish(vllm_batch(root, stored_event(2, parent=1, block_size=block_size)))

        async def is_known() -> bool:
            found = [rank for each in await workers(frontend) for rank in each["ranks"]]
            return [(rank["index_blocks"], rank["total_blocks"]) for rank in found] == [(2, n_blocks)]

        await eventually(is_known)
        (found,) = await workers(frontend)
        assert (found["worker_id"], found["model"], found["domains"]) == (7, "tiny", {"zone": "a"})
        assert found["engine"].startswith(f"{kind.replace('trtllm', 'tensorrt_llm')} ")
        assert [model["block_size"] for model in (await frontend.fleet())["models"]] == [block_size]

        async def is_set_aside() -> bool:
            return [(each["draining"], each["engine_silent"]) for each in await workers(frontend)] == [
                (False, True)
            ]

        async def is_back() -> bool:
            return [each["engine_silent"] for each in await workers(frontend)] == [False]

        assert await is_back()
        await scripted.stop()
        await eventually(is_set_aside)
        await scripted.start()
        await eventually(is_back)
        await running.has_logged("engine_answers")
        lines = running.lines()
        assert f' engine_attached worker=7 url={scripted.url} version="{kind} ' in lines
        assert f" block_size={block_size} " in lines
        assert lines.index("engine_attached") < lines.index("engine_silent") < lines.index("engine_answers")
        assert await running.stop() == 0

        async def is_gone() -> bool:
            return not await workers(frontend)

        await eventually(is_gone)
        assert " drain " in running.lines()
        assert "Traceback" not in running.lines()


async def start(processes: Fleet, kind: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "worker", kind, *arguments),
        env=processes.environ,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )


async def test_a_worker_that_waits_says_so_at_its_health_port() -> None:
    port, nowhere = free_ports(1), free_ports(1)
    url = f"http://127.0.0.1:{nowhere}"
    async with fleet(SETTINGS) as processes, httpx.AsyncClient(timeout=60.0) as http:
        flags = ("--url", url, "--worker-id", "7", "--health-port", str(port), "--role", "decode")
        process = await start(processes, "vllm", *flags)
        try:

            async def waits() -> bool:
                try:
                    status = (await http.get(f"http://127.0.0.1:{port}/accepting")).json()
                except httpx.ConnectError:
                    return False
                (problem,) = status.get("engine_problems", [{}])
                return (
                    status["status"] == "starting"
                    and problem.get("engine_url") == url
                    and problem["worker_id"] == 7
                    and problem["state"] == "awaited"
                    and "connection refused" in problem["reason"]
                )

            await eventually(waits)
        finally:
            process.terminate()
            assert (await ended(process))[0] == 0


async def ended(process: Process) -> tuple[int | None, str]:
    """Wait until it ends; return its exit code, and what it wrote."""
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            _, written = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, written.decode()


@pytest.mark.parametrize(
    ("kind", "flags", "says"),
    [
        ("vllm", ("--model", "big"), "--model: the engine serves tiny, not 'big': give one of these"),
        ("sglang", (), "is owned by 'vllm', not 'sglang': is it SGLang's server?"),
    ],
)
async def test_a_flag_contradicting_the_engine_is_one_line_and_exit_code_2(
    kind: str, flags: tuple[str, ...], says: str
) -> None:
    async with scripted_engine() as scripted, fleet(SETTINGS) as processes:
        code, lines = await ended(await start(processes, kind, "--url", scripted.url, *flags))
    reported = [line for line in lines.splitlines() if line.startswith("kvrouter: ")]
    assert len(reported) == 1, lines
    assert says in reported[0]
    assert code == 2
    assert "Traceback" not in lines


async def test_sigterm_ends_a_worker_waiting_for_its_engine() -> None:
    async with scripted_engine() as scripted, fleet(SETTINGS) as processes:
        scripted.pages["/v1/models"] = ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        process = await start(processes, "vllm", "--url", scripted.url)

        async def is_asked() -> bool:
            return process.returncode is not None or bool(scripted.asked["/v1/models"])

        await eventually(is_asked)
        process.terminate()
        code, lines = await ended(process)
    assert code == 0, lines
    assert "Traceback" not in lines
