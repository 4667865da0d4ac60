"""vLLM's own AsyncLLM in the worker's process, as the example has it: it is found, asked, and known."""

import asyncio
import signal
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.system.engines.install import VARIABLE, engines_dir
from tests.system.engines.real_engine import MODEL, READY_WITHIN_S
from tests.system.engines.vllm_server import BLOCK_SIZE, ENVIRON
from tests.testing.processes import ENDS_WITHIN_S, Fleet, eventually, fleet

ROOT = Path(__file__).parents[3]
PROMPT = list(range(20, 20 + 8 * BLOCK_SIZE))
EXAMPLE = ROOT / "examples" / "vllm_in_process.py"

RUN = """
import runpy, sys
sys.path += sys.argv.pop(1).split(":")
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the example in vLLM's environment: what is not there, kvrouter too, comes from this one."""


def last_lines(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


@asynccontextmanager
async def embedded(processes: Fleet, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    home = engines_dir()
    assert (home / "model.installed").is_file(), f"make test-engines installs the engines ({VARIABLE})"
    here = f"{ROOT / 'src'}:{sysconfig.get_path('purelib')}"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *("taskset", "--cpu-list", "0", str(home / "venv" / "bin" / "python"), "-c", RUN, here),
            *(str(EXAMPLE), "--model", str(home / "model"), "--served-model-name", MODEL),
            *("--dtype", "bfloat16", "--max-model-len", "2048", "--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", "200", "--enforce-eager"),
            env={**processes.environ, **ENVIRON, "DYN_EVENT_PLANE": "zmq"},
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    except BaseException:
        print(last_lines(log))
        raise
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(ENDS_WITHIN_S):
                await process.wait()


async def test_an_engine_embedded_in_its_worker_joins_and_leaves_the_fleet(tmp_path: Path) -> None:
    async with (
        fleet({"DYN_EVENT_PLANE": "zmq"}) as processes,
        embedded(processes, tmp_path / "vllm.log") as engine,
    ):
        frontend = await processes.frontend()

        async def is_ready() -> bool:
            assert engine.returncode is None
            return (await frontend.http.get("/ready")).status_code == 200

        await eventually(is_ready, limit_s=READY_WITHIN_S)
        body: dict[str, object] = {
            "model": MODEL,
            "prompt": list(range(20, 20 + 8 * BLOCK_SIZE)),
            "max_tokens": 8,
            "temperature": 0,
        }

        async def ask(**more: object) -> tuple[str, int]:
            answer = (await frontend.http.post("/v1/completions", json={**body, **more})).raise_for_status()
            usage = answer.json()["usage"]["prompt_tokens_details"]
            return answer.json()["choices"][0]["text"], usage["cached_tokens"]

        text, cached_tokens = await ask()
        assert cached_tokens == 0

        async def is_known() -> bool:
            (worker,) = (await frontend.fleet())["workers"]
            return bool(worker["ranks"][0]["index_blocks"] >= 8)

        await eventually(is_known)
        assert await ask() == (text, 7 * BLOCK_SIZE)
        (rank,) = (await frontend.fleet())["workers"][0]["ranks"]
        assert (rank["feed"]["state"], rank["total_blocks"], rank["predictions"]["wrong"]) == ("live", 200, 0)

        async def active_blocks() -> int:
            (worker,) = (await frontend.fleet())["workers"]
            return int(worker["ranks"][0]["report"]["active_blocks"])

        async def is_busy() -> bool:
            return await active_blocks() > 0

        async def is_idle() -> bool:
            return await active_blocks() == 0

        async with frontend.http.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        ) as stream:
            lines = stream.aiter_lines()  # whoever drops it in mid-answer closes the connection
            await anext(lines)
            await eventually(is_busy)
        await eventually(is_idle)  # its client left, long before the answer ended
        assert (await ask())[0] == text

        engine.send_signal(signal.SIGTERM)
        async with asyncio.timeout(ENDS_WITHIN_S):
            assert await engine.wait() == 0

        async def is_gone() -> bool:
            return not (await frontend.fleet())["workers"]

        await eventually(is_gone)
