"""What routing knows of a prompt on routes that pass."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.ids import ModelName
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.openai.body import BodyBounds, scanned
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES, PassedRoute, parse_passed
from kvrouter.frontend.openai.passthrough import PassthroughCall
from kvrouter.frontend.response_passthrough import PassthroughTokens, passthrough_tokens
from kvrouter.text.prompts.fields import Prompt
from tests.testing.frontend_harness import mock_text

ROUTES: dict[CallRoute, PassedRoute] = {route.route: route for route in PASSED_ROUTES}
CHAT = [{"role": "user", "content": "hi"}]


def parsed(route: CallRoute, **body: Any) -> PassthroughCall:
    data = scanned(json.dumps({"model": "m", **body}).encode(), BodyBounds())
    return parse_passed(ROUTES[route], ModelName("m"), data)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm", ""])
async def test_items_from_the_first_unknown_one_on_are_left_out(kind: str) -> None:
    text = mock_text()
    items = [*CHAT, {"type": "item_reference", "id": "x"}, {"role": "user", "content": "later"}]
    found = await passthrough_tokens(parsed(CallRoute.RESPONSES, input=items), text, kind)
    prompt = Prompt(CHAT, add_generation_prompt=False)
    assert found == PassthroughTokens(await text.encode_made(prompt), is_exact=False)


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
async def test_prompts_from_engine_state_or_unknown_items_are_unknown(body: dict[str, Any]) -> None:
    passed = parsed(CallRoute.RESPONSES, **body)
    tokens = await passthrough_tokens(passed, mock_text(), "vllm")
    assert not tokens.token_ids


def test_max_tokens_is_read_from_each_routes_field() -> None:
    assert parsed(CallRoute.RESPONSES, input="a", max_output_tokens=7).call.max_tokens == 7
    assert parsed(CallRoute.MESSAGES, messages=CHAT, max_tokens=8).call.max_tokens == 8
    assert parsed(CallRoute.RESPONSES, input="a", max_output_tokens="9").call.max_tokens == 9
    for wrong in (0, -3, "nine", None, [1]):
        assert parsed(CallRoute.RESPONSES, input="a", max_output_tokens=wrong).call.max_tokens is None
    assert parsed(CallRoute.EMBEDDINGS, input="a", max_tokens=8).call.max_tokens == 1


def test_only_streaming_routes_stream() -> None:
    assert parsed(CallRoute.RESPONSES, input="a", stream=True).client_call.stream
    assert not parsed(CallRoute.EMBEDDINGS, input="a", stream=True).client_call.stream
    assert not parsed(CallRoute.RESPONSES, input="a", stream=None).client_call.stream
    assert parsed(CallRoute.RESPONSES, input="a", stream="yes").client_call.stream
    assert not parsed(CallRoute.RESPONSES, input="a", stream=["yes"]).client_call.stream


def test_the_page_has_a_row_for_every_route() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text("utf-8")
    rows = re.findall(r"^\| `POST (/\S+)` \| .* \| (yes|no) \|$", page, re.MULTILINE)
    assert rows == [(route.route.value, "yes" if route.streams else "no") for route in PASSED_ROUTES]
    assert f"[{len(PASSED_ROUTES)} further routes of engines]" in page
