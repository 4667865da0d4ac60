"""What holds for a real engine that the ``openai`` client asks through kvrouter and directly.

A module of tests subclasses :class:`ClientLaw` and has a fixture ``engine``.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from tests.system.engines.calls import attached
from tests.system.engines.real_engine import MODEL, RealEngine
from tests.testing.processes import Fleet, Frontend

MESSAGES: list[Any] = [
    {"role": "system", "content": "You route requests."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": "my cache?"}],
    },
]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_blocks",
        "description": "Finds KV blocks.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["zone"],
        },
    },
}

SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["a", "b"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}

CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find_blocks"}}},
    "tools in the prompt": {"tools": [TOOL], "tool_choice": "none"},
    "json": {"response_format": SCHEMA},
    "any json": {"response_format": {"type": "json_object"}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "several": {"n": 2, "seed": 7, "temperature": 0.8},
    "stop": {"stop": ["e"]},
    "unknown field": {"extra_body": {"repetition_detection": None, "of_nobody": {"a": [1, 2]}}},
}


COMPLETIONS: tuple[dict[str, Any], ...] = ({}, {"logprobs": 2}, {"echo": True}, {"prompt": [5, 6, 7, 8]})


@dataclass
class Ways:
    """Both ways to the engine."""

    through: AsyncOpenAI
    direct: AsyncOpenAI
    frontend: Frontend


class ClientLaw:
    """The tests."""

    messages: ClassVar[list[Any]] = MESSAGES
    cases: ClassVar[Mapping[str, dict[str, Any]]] = CASES

    @pytest_asyncio.fixture(loop_scope="module")
    async def ways(self, engine: RealEngine, kvrouter: Fleet) -> AsyncIterator[Ways]:
        """The engine, and kvrouter before it."""
        frontend = await attached(kvrouter, {1: engine})
        clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none") for url in (frontend.url, engine.url)]
        yield Ways(clients[0], clients[1], frontend)
        for client in clients:
            await client.close()

    async def test_whole_chats_through_kvrouter_equal_direct_ones(self, ways: Ways) -> None:
        for name, extra in self.cases.items():
            asked = {"model": MODEL, "messages": self.messages, "temperature": 0, "max_tokens": 24, **extra}
            direct = await ways.direct.chat.completions.create(**asked)
            raw = await ways.through.chat.completions.with_raw_response.create(**asked)
            through = raw.parse()
            assert _without_names(through) == _without_names(direct), name
            assert through.usage is not None
            seen_tokens = await _isl_tokens(ways.frontend, raw.headers["x-request-id"])
            assert seen_tokens == through.usage.prompt_tokens, name

    async def test_streamed_chats_through_kvrouter_equal_direct_ones(self, ways: Ways) -> None:
        for name, extra in self.cases.items():
            if name == "several":
                continue  # two answers are interleaved as they come
            asked = {
                "model": MODEL,
                "messages": self.messages,
                "temperature": 0,
                "max_tokens": 24,
                "stream": True,
                "stream_options": {"include_usage": True},
                **extra,
            }
            direct = [
                _without_names(event) async for event in await ways.direct.chat.completions.create(**asked)
            ]
            through = [
                _without_names(event) async for event in await ways.through.chat.completions.create(**asked)
            ]
            assert _merged(through) == _merged(direct), name

    async def test_completions_through_kvrouter_equal_direct_ones(self, ways: Ways) -> None:
        for extra in COMPLETIONS:
            asked: dict[str, Any] = {
                "model": MODEL,
                "prompt": "def route(",
                "temperature": 0,
                "max_tokens": 12,
                **extra,
            }
            direct = await ways.direct.completions.create(**asked)
            through = await ways.through.completions.create(**asked)
            assert _without_names(through) == _without_names(direct)

    async def test_streamed_completions_through_kvrouter_equal_direct_ones(self, ways: Ways) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "def route(", "temperature": 0, "max_tokens": 12}
        direct, through = [
            [_without_names(event) async for event in await way.completions.create(**asked, stream=True)]
            for way in (ways.direct, ways.through)
        ]
        assert "".join(_text(event) for event in through) == "".join(_text(event) for event in direct)
        assert through[-1] == direct[-1]
        assert {_shape(event) for event in through} == {_shape(event) for event in direct}

    async def test_engine_refusals_have_the_engines_message_and_field(self, ways: Ways) -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": self.messages, "max_tokens": 100_000}
        with pytest.raises(BadRequestError) as direct:
            await ways.direct.chat.completions.create(**asked)
        for stream in (False, True):
            with pytest.raises(BadRequestError) as through:
                await ways.through.chat.completions.create(**asked, stream=stream)
            assert isinstance(direct.value.body, dict)
            assert isinstance(through.value.body, dict)
            assert through.value.body["message"] == direct.value.body["message"]
            assert through.value.body["param"] == direct.value.body["param"]


def _without_names(answer: Any) -> dict[str, Any]:
    """An answer without what differs between any two: ids, times, and what was cached."""
    reported: dict[str, Any] = answer.model_dump(warnings=False)
    for name in ("id", "created", "metrics"):
        reported.pop(name, None)
    usage = reported.get("usage")
    if usage:
        usage.pop("prompt_tokens_details", None)
    for choice in reported["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        for call in message.get("tool_calls") or []:
            call.pop("id", None)
    return reported


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _shape(event: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The names of its fields, and of those of its choices."""
    return tuple(tuple(sorted(fields)) for fields in (event, *event["choices"]))


def _merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events whose text, calls and logprobs are joined: a busy engine may tell two tokens at once."""
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls") or []]
    reported = {
        "text": text,
        "calls": [call["name"] for call in calls if call.get("name")],
        "arguments": "".join(call.get("arguments") or "" for call in calls),
        "logprobs": [
            token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or []
        ],
    }
    rest = [
        {**event, "choices": [{**choice, "delta": None, "logprobs": None} for choice in event["choices"]]}
        for event in events
        if any(choice["finish_reason"] for choice in event["choices"]) or not event["choices"]
    ]
    return [reported, *rest]


async def _isl_tokens(frontend: Frontend, request_id: str) -> int:
    """How long the prompt was at the decision."""
    reply = await frontend.http.get(f"/v1/decisions/{request_id}")
    tokens: int = reply.raise_for_status().json()["attempts"][-1]["isl_tokens"]
    return tokens
