"""What routing knows of a prompt on routes that pass: the same tokens as of the same chat."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from kvrouter.core.ids import ModelName
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.openai.body import BodyBounds, scanned
from kvrouter.frontend.openai.passed import PASSED_ROUTES, PassedRoute, parse_passed
from kvrouter.frontend.openai.passthrough import PassthroughCall
from kvrouter.frontend.response_passthrough import passthrough_tokens
from kvrouter.text.model import TextModel
from tests.support.parsed import parse_passthrough

ROUTES: dict[CallRoute, PassedRoute] = {route.route: route for route in PASSED_ROUTES}
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and now?"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]


def parsed(route: CallRoute, **body: Any) -> PassthroughCall:
    data = scanned(json.dumps({"model": "m", **body}).encode(), BodyBounds())
    return parse_passed(ROUTES[route], ModelName("m"), data)


SAME: list[tuple[CallRoute, dict[str, Any], dict[str, Any]]] = [
    (CallRoute.RESPONSES, {"input": "hi"}, {"messages": CHAT[1:2]}),
    (CallRoute.RESPONSES, {"input": "hi", "instructions": "be brief"}, {"messages": CHAT[:2]}),
    (CallRoute.RESPONSES, {"input": CHAT[1:], "instructions": "be brief"}, {"messages": CHAT}),
    (
        CallRoute.RESPONSES,
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
            ]
        },
        {"messages": CHAT[1:3]},
    ),
    (
        CallRoute.RESPONSES,
        {"input": "hi", "tools": [{"type": "function", **TOOL}]},
        {"messages": CHAT[1:2], "tools": CHAT_TOOLS},
    ),
    (CallRoute.MESSAGES, {"messages": CHAT[1:], "system": "be brief", "max_tokens": 5}, {"messages": CHAT}),
    (
        CallRoute.MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
            ],
            "system": [{"type": "text", "text": "be brief"}],
            "max_tokens": 5,
        },
        {"messages": CHAT[:2]},
    ),
    (
        CallRoute.MESSAGES,
        {
            "messages": CHAT[1:2],
            "max_tokens": 5,
            "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
        },
        {"messages": CHAT[1:2], "tools": CHAT_TOOLS},
    ),
]


@pytest.mark.parametrize(("route", "body", "chat"), SAME)
def test_a_prompt_is_that_of_the_same_chat(
    route: CallRoute, body: dict[str, Any], chat: dict[str, Any]
) -> None:
    of_chat = parse_passthrough(CallRoute.CHAT, json.dumps({"model": "m", **chat}).encode())
    passed = parsed(route, **body)
    assert passed.body.messages == of_chat.body.messages
    assert passed.body.tools == of_chat.body.tools


def test_what_follows_an_item_that_is_no_message_is_not_known() -> None:
    items = [CHAT[1], {"type": "function_call_output", "call_id": "c", "output": "4"}, CHAT[3]]
    assert parsed(CallRoute.RESPONSES, input=items).body.messages == [CHAT[1]]


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hi", "previous_response_id": "resp_1"},
        {"prompt": {"id": "p"}, "input": "hi"},
        {"input": 5},
        {"input": None},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [1, None, "a"]},
    ],
)
async def test_of_what_one_engine_keeps_or_nobody_understands_nothing_is_known(body: dict[str, Any]) -> None:
    passed = parsed(CallRoute.RESPONSES, **body)
    tokens = await passthrough_tokens(passed, cast("TextModel", None))
    assert not tokens.token_ids


def test_how_long_an_answer_may_be() -> None:
    assert parsed(CallRoute.RESPONSES, input="a", max_output_tokens=7).call.max_tokens == 7
    assert parsed(CallRoute.MESSAGES, messages=CHAT[1:2], max_tokens=8).call.max_tokens == 8
    assert parsed(CallRoute.RESPONSES, input="a", max_output_tokens="9").call.max_tokens == 9
    for wrong in (0, -3, "nine", None, [1]):
        assert parsed(CallRoute.RESPONSES, input="a", max_output_tokens=wrong).call.max_tokens is None
    assert parsed(CallRoute.EMBEDDINGS, input="a", max_tokens=8).call.max_tokens == 1


def test_only_what_has_a_stream_is_streamed() -> None:
    assert parsed(CallRoute.RESPONSES, input="a", stream=True).client_call.stream
    assert not parsed(CallRoute.EMBEDDINGS, input="a", stream=True).client_call.stream
    assert not parsed(CallRoute.RESPONSES, input="a", stream=None).client_call.stream
    assert parsed(CallRoute.RESPONSES, input="a", stream="yes").client_call.stream
    assert not parsed(CallRoute.RESPONSES, input="a", stream=["yes"]).client_call.stream


def test_the_page_has_a_row_for_every_route() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text("utf-8")
    rows = re.findall(r"^\| `POST (/\S+)` \| .* \| (yes|no) \|$", page, re.MULTILINE)
    assert rows == [(route.route.value, "yes" if route.streams else "no") for route in PASSED_ROUTES]
    assert f"[{len(PASSED_ROUTES)} further routes of engines]" in page
