"""Real vLLM engines are restarted under load, one after the other: no call fails, streamed or not."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.engines.calls import attached, stopped, two_of
from tests.engines.real_engine import MODEL
from tests.engines.vllm_server import VllmServer
from tests.support.processes import Fleet, Frontend, eventually
from tests.support.waits import until

RESTARTS = 20
CALLERS = 4
ANSWER_TOKENS = 200
CALL_LIMIT_S = 45.0
"""Far above the slowest answer, and far below the time that a call that hangs would take."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Load:
    """Callers that ask one call after the other, streamed and whole in turn, until they are told to end."""

    def __init__(self, frontend: Frontend) -> None:
        self.failed: list[str] = []
        self.answered = 0
        self._frontend = frontend
        self._numbers = itertools.count()
        self._ends = asyncio.Event()
        self._callers = [asyncio.create_task(self._call_on()) for _ in range(CALLERS)]

    def has_answered(self, more_than: int) -> bool:
        return self.answered > more_than

    async def end(self) -> None:
        self._ends.set()
        await asyncio.gather(*self._callers)

    async def _call_on(self) -> None:
        while not self._ends.is_set():
            number = next(self._numbers)
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    wrong = await self._call(number, stream=number % 2 == 0)
            except (TimeoutError, httpx.HTTPError) as error:
                wrong = repr(error)
            if wrong is not None:
                self.failed.append(f"{number}: {wrong}")

    async def _call(self, number: int, *, stream: bool) -> str | None:
        """Ask; return what is wrong with the answer."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Story {number}: "}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        answer = await self._frontend.http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[-300:]}"
        if not _is_whole(answer.text, stream=stream):
            return answer.text[-900:]
        self.answered += 1
        return None


def _is_whole(text: str, *, stream: bool) -> bool:
    if not stream:
        return bool(json.loads(text)["choices"][0]["finish_reason"] == "length")
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", [])]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return lines[-1:] == ["[DONE]"] and ends == ["length"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines with equal weights."""
    async with stopped(two_of(VllmServer, engine_folder)) as both:
        yield both


@pytest.mark.parametrize("flags", [(), ("--shutdown-timeout", "20")], ids=["abort", "drain"])
async def test_no_call_fails_while_engines_are_restarted(
    engines: dict[int, VllmServer], kvrouter: Fleet, flags: tuple[str, ...]
) -> None:
    for engine in engines.values():
        if engine.is_running:
            await engine.kill()
        await engine.start(flags=flags)
    frontend = await attached(kvrouter, engines)
    load = Load(frontend)
    await until(partial(load.has_answered, CALLERS))
    for n in range(RESTARTS // 2):
        engine = engines[1 + n % len(engines)]
        await engine.terminate()
        await engine.start(flags=flags)
        await eventually(partial(_no_engine_is_silent, frontend))
        await until(partial(load.has_answered, load.answered + CALLERS))
        print(f"restart {n + 1}: {load.answered} calls answered, {len(load.failed)} failed", flush=True)
    await load.end()
    assert load.failed == []


async def _no_engine_is_silent(frontend: Frontend) -> bool:
    return not any(worker["engine_silent"] for worker in (await frontend.fleet())["workers"])
