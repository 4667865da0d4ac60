"""Streamed answers of a real frontend, whose worker brings one token after the other over tcp."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.frontend.client import wait_ready
from benchmarks.frontend.processes import Server, module, our_frontend
from kvrouter.text.model import mock_words

TICK_S = 0.005
N_TOKENS = 60
WORDS = mock_words()


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("discovery")
    folder.chmod(0o700)
    with ExitStack() as stack:
        stack.enter_context(module("benchmarks.frontend.worker", str(TICK_S), "1", str(folder)))
        yield stack.enter_context(our_frontend(Path(sys.executable), folder))


async def events_of(server: Server, **more: object) -> list[Any]:
    """The events of a streamed chat, read to its end."""
    await wait_ready(server.port)
    body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    events: list[Any] = []
    async with (
        httpx.AsyncClient(timeout=60.0) as client,
        client.stream("POST", url, json={**body, "max_tokens": N_TOKENS, **more}) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def text_of(events: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def words_down_to(last: int) -> str:
    """What the worker brings: words from the list's end towards its begin."""
    return "".join(f" {WORDS[number]}" for number in range(N_TOKENS - 1, last - 1, -1))


async def test_every_token_arrives_once_and_in_order(frontend: Server) -> None:
    events = await events_of(frontend)
    assert text_of(events) == words_down_to(0)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_in_the_middle_ends_the_answer_before_it(frontend: Server) -> None:
    events = await events_of(frontend, stop=[f" {WORDS[30]} {WORDS[29]}"])
    assert text_of(events) == words_down_to(31)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_with_every_event_counts_the_tokens_so_far(frontend: Server) -> None:
    events = await events_of(frontend, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    assert counts == sorted(counts)
    assert counts[0] < N_TOKENS
    assert counts[-1] == N_TOKENS
    assert text_of(events) == words_down_to(0)
