"""The ``openai`` client asks a real vLLM engine through kvrouter and directly: the same answers."""

import re
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from tests.system.engines.calls import stopped
from tests.system.engines.client_law import ClientLaw, Ways
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import VllmServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[VllmServer]:
    """One engine."""
    async with stopped({1: VllmServer(engine_folder, "vllm", core=0)}) as one:
        await one[1].start(flags=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
        yield one[1]


class TestVllm(ClientLaw):
    """vLLM keeps the law."""

    async def test_other_routes_through_kvrouter_equal_direct_ones(
        self, ways: Ways, engine: VllmServer
    ) -> None:
        chat = [{"role": "user", "content": "Where is my cache?"}]
        calls: dict[str, dict[str, Any]] = {
            "/v1/responses": {"input": "Where is my cache?", "max_output_tokens": 8, "temperature": 0},
            "/v1/messages": {"messages": chat, "max_tokens": 8, "temperature": 0},
            "/v1/messages/count_tokens": {"messages": chat},
            "/tokenize": {"prompt": "Where is my cache?"},
            "/detokenize": {"tokens": [5, 6, 7]},
            "/v1/embeddings": {"input": "a model that has none"},
        }
        async with httpx.AsyncClient(timeout=60.0) as http:
            for path, call in calls.items():
                for streams in (False, True) if path in STREAMED else (False,):
                    body = {"model": MODEL, **call, "stream": True} if streams else {"model": MODEL, **call}
                    direct, through = [
                        await http.post(f"{url}{path}", json=body) for url in (engine.url, ways.frontend.url)
                    ]
                    if direct.status_code != 200:  # the model has no vectors: vLLM has no such route then
                        assert direct.status_code == through.status_code == 404, path
                        continue
                    assert through.status_code == 200, f"{path}: {through.text}"
                    assert _as_said(through.text) == _as_said(direct.text), path
                    worker = through.headers["x-kvrouter-decode-worker"]
                    assert worker == "1"

    async def test_streams_through_kvrouter_have_the_direct_ones_lines(
        self, ways: Ways, engine: VllmServer
    ) -> None:
        async with httpx.AsyncClient(timeout=60.0) as http:
            for path, call in _unicode_calls():
                direct = through = b""
                for _ in range(TRIES):  # two tokens may come in one event where the engine has much to do
                    direct, through = [
                        _NAMES.sub(b"", (await http.post(f"{url}{path}", json=call)).content)
                        for url in (engine.url, ways.frontend.url)
                    ]
                    if through == direct:
                        break
                assert through.splitlines() == direct.splitlines(), call


TRIES = 5

PROMPTS = ("Grüße 你好 🦙👩‍🚀", "a", "Where is my cache?", "hi", "日本語のテキスト", "🏳️‍🌈 ñ \u0301")
"""A tiny model answers them with characters that its tokens cut."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ["e", "the"]},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    {"stream_options": None},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True},
    {"return_token_ids": False},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"max_tokens": 1},
)


def _unicode_calls() -> Iterator[tuple[str, dict[str, Any]]]:
    common = {"model": MODEL, "temperature": 0, "max_tokens": 40, "stream": True}
    for prompt in PROMPTS:
        for options in OPTIONS if prompt in PROMPTS[:2] else OPTIONS[:1]:
            chat = {**common, "messages": [{"role": "user", "content": prompt}], **options}
            yield "/v1/chat/completions", chat
            if "tools" in options:
                continue
            logprobs = {"logprobs": 2, "top_logprobs": None} if "logprobs" in options else {}
            yield "/v1/completions", {**common, "prompt": prompt, **options, **logprobs}


_NAMES = re.compile(rb'"id":"[^"]*"|"created":[0-9]+')

STREAMED = frozenset({"/v1/responses", "/v1/messages"})
_OWN = re.compile(
    r'"((?:msg|resp|chatcmpl|rs|reasoning)[-_])[0-9a-zA-Z_-]+"|"(?:created_at|completed_at)":[0-9.]+'
    r'|"id":"[^"]+"|"item_id":"[^"]*"'
)
"""What differs between any two answers: names and moments."""

_DELTA = re.compile(r'"(?:delta|text)":"((?:[^"\\]|\\.)*)"')
_KIND = re.compile(r"^event: (\S+)$", re.MULTILINE)


def _as_said(text: str) -> object:
    """An answer without what is its own; of a stream the text in order, and the kinds of its events: how much
    of a text comes in one event is a matter of time.
    """
    kinds = _KIND.findall(text)
    if not kinds:
        return _OWN.sub("", text)
    return "".join(_DELTA.findall(text)), [kind for kind, _ in groupby(kinds)]
