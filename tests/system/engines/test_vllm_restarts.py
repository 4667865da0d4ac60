"""Real vLLM engines are restarted under load, one after the other: no call fails or changes its text."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.system.engines.calls import attached, stopped, two_of, worker_of
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet, Frontend, eventually
from tests.testing.waits import until

RESTARTS = 20
CALLERS = 4
ANSWER_TOKENS = 200
MESSAGES_TURN = 3
"""Of four calls in turn this one is a message, and not streamed."""

STORIES = 8
"""Prompts, asked over and over."""

CALL_WITHIN_S = 15.0
"""How soon a restarted engine answers one of the calls, short as they are."""

CALL_LIMIT_S = 45.0
"""Far above the slowest answer, and far below the time that a call that hangs would take."""


class Load:
    """Callers that ask one call after the other, until they are told to end: chats, streamed and whole, and
    messages in turn.
    """

    def __init__(self, frontend: Frontend) -> None:
        self.failed: list[str] = []
        self.answered = Counter[int]()
        """How many answers were whole, by the worker that ended them or began them."""

        self._texts: dict[tuple[str, int], str] = {}
        """The first answer by path and prompt: every later one is the same, since calls are greedy."""

        self._frontend = frontend
        self._numbers = itertools.count()
        self._ends = asyncio.Event()
        self._callers = [asyncio.create_task(self._call_on()) for _ in range(CALLERS)]

    def has_answered(self, worker_id: int, more_than: int) -> bool:
        return self.answered[worker_id] > more_than

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
        path = "/v1/messages" if number % 4 == MESSAGES_TURN else "/v1/chat/completions"
        story = number // 4 % STORIES
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Story {story}: "}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            **({} if number % 4 == MESSAGES_TURN else {"ignore_eos": True}),
            "stream": stream,
        }
        answer = await self._frontend.http.post(path, json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[-300:]}"
        text = (_streamed_text if stream else _text)(answer.text)
        if text is None:
            return answer.text[-900:]
        self.answered[worker_of(answer)] += 1
        first = self._texts.setdefault((path, story), text)
        return None if text == first else f"it differs: {text!r}, at first {first!r}"


def _text(answer: str) -> str | None:
    """The text of a message or a chat, None unless it is whole."""
    message = json.loads(answer)
    if "choices" not in message:
        is_whole = message.get("stop_reason") is not None
        return "".join(part["text"] for part in message["content"]) if is_whole else None
    (choice,) = message["choices"]
    return choice["message"]["content"] if choice["finish_reason"] == "length" else None


def _streamed_text(answer: str) -> str | None:
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", [])]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if lines[-1:] != ["[DONE]"] or ends != ["length"]:
        return None
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines with equal weights."""
    async with stopped(two_of(VllmServer, engine_folder)) as both:
        yield both


@pytest.mark.parametrize("flags", [(), ("--shutdown-timeout", "20")], ids=["abort", "drain"])
async def test_no_call_fails_or_differs_while_engines_are_restarted(
    engines: dict[int, VllmServer], kvrouter: Fleet, flags: tuple[str, ...]
) -> None:
    for engine in engines.values():
        if engine.is_running:
            await engine.kill()
        await engine.start(flags=flags)
    frontend = await attached(kvrouter, engines)
    load = Load(frontend)
    await until(lambda: load.answered.total() > CALLERS)
    for n in range(RESTARTS // 2):
        worker_id = 1 + n % len(engines)
        await engines[worker_id].terminate()
        await engines[worker_id].start(flags=flags)
        await eventually(partial(_no_engine_is_silent, frontend))
        async with asyncio.timeout(CALL_WITHIN_S):
            await until(partial(load.has_answered, worker_id, load.answered[worker_id]))
        answered = load.answered.total()
        print(f"restart {n + 1}: {answered} calls answered, {len(load.failed)} failed", flush=True)
    await load.end()
    assert load.failed == []


async def _no_engine_is_silent(frontend: Frontend) -> bool:
    return not any(worker["engine_silent"] for worker in (await frontend.fleet())["workers"])
