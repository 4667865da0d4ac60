"""An engine that hangs next to a worker that lives: connections are taken, and nothing is ever answered."""

import asyncio
import signal
from collections.abc import Callable
from functools import partial

from kvrouter.text.source import MOCK_FOLDER
from tests.testing.engine_process import EngineProcess, engine_process
from tests.testing.processes import Fleet, Frontend, eventually, fleet

TTFT_S = 10.0
"""Far more than a busy machine needs for an engine that lives."""
SETTINGS = {
    "DYN_EVENT_PLANE": "zmq",
    "KVROUTER_TTFT_TIMEOUT_S": str(TTFT_S),
    "KVROUTER_CIRCUIT_OPEN_S": "1",
}
HUNG = 1


async def companion(processes: Fleet, engine: EngineProcess, worker_id: int) -> None:
    flags = ("--url", engine.url, "--no-kv-events", "--worker-id", str(worker_id))
    await processes.worker(*flags, "--tokenizer", str(MOCK_FOLDER), engine="vllm")


async def ask(frontend: Frontend, number: int) -> int:
    """Ask for a streamed answer; return its status."""
    body = {"model": "tiny", "prompt": f"{number} here", "stream": True, "max_tokens": 8}
    response = await frontend.http.post("/v1/completions", json=body)
    assert response.status_code in (200, 504), response.text
    assert (response.status_code == 504) or b"word" in response.content
    return response.status_code


async def circuit(frontend: Frontend) -> str:
    workers = (await frontend.fleet())["workers"]
    return str(next(each["circuit"] for each in workers if each["worker_id"] == HUNG))


async def test_a_hung_engine_costs_few_deadlines_and_is_used_again_later(
    record_property: Callable[[str, object], None],
) -> None:
    async with engine_process() as hung, engine_process() as well, fleet(SETTINGS) as processes:
        _, _, frontend = await asyncio.gather(
            companion(processes, hung, HUNG),
            companion(processes, well, 2),
            processes.frontend("--model-path", f"tiny={MOCK_FOLDER}"),
        )
        await eventually(partial(frontend.serves, 2))
        assert await asyncio.gather(*(ask(frontend, each) for each in range(4))) == 4 * [200]
        hung.process.send_signal(signal.SIGSTOP)
        began_s = asyncio.get_running_loop().time()
        first = await asyncio.gather(*(ask(frontend, each) for each in range(10, 30)))
        record_property("requests that met the hung engine", first.count(504))
        assert first.count(504) >= 3
        assert await circuit(frontend) in ("open", "half_open")
        record_property("opened after s", round(asyncio.get_running_loop().time() - began_s, 2))
        # From now on only one request at a time finds out whether it is well again.
        later = [await ask(frontend, each) for each in range(40, 60)]
        assert later.count(504) < 10, later
        await frontend.has_logged("circuit_opened")
        hung.process.send_signal(signal.SIGCONT)

        async def is_well() -> bool:
            # several at once: alone, each would go to the one that has been the faster of the two
            await asyncio.gather(*(ask(frontend, each) for each in range(90, 100)))
            return await circuit(frontend) == "closed"

        await eventually(is_well)
        await frontend.has_logged("circuit_closed")
