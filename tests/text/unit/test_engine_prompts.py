"""Prompts as engines make them, against what the engine's own code makes of the same calls."""

import contextlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import CallRoute
from kvrouter.text.chat import ChatTemplate
from kvrouter.text.prompts import prompt_maker
from kvrouter.text.prompts.fields import (
    ARGUMENT_VALUES_MAX,
    DEPTH_MAX,
    Prompt,
    PromptFields,
    TemplateTraits,
)
from tests.testing.body_parsers import parse_passed_chat
from tests.testing.prompt_shapes import SHAPES, Shape
from tests.testing.prompt_templates import TEMPLATES

_DATA = Path(__file__).parents[2] / "data" / "engine-prompts"
ENGINES = {path.name.partition("-")[0]: json.loads(path.read_text("utf-8")) for path in _DATA.glob("*.json")}
_TEMPLATES = {name: ChatTemplate(source) for name, source in TEMPLATES.items()}


def rendered(kind: str, template: ChatTemplate, shape: Shape) -> str:
    fields = parse_passed_chat(shape.route, {"model": "m", **shape.body})
    return template.render_prompt(prompt_maker(kind)(fields, template.traits))


def rendered_by_engines() -> Iterator[tuple[str, str, Shape, str]]:
    """What each engine renders, without what it refuses."""
    for kind, template, shape in product(ENGINES, TEMPLATES, SHAPES):
        expected = ENGINES[kind]["prompts"][template].get(shape.name)
        if isinstance(expected, str):
            yield kind, template, shape, expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ENGINES)
def test_recorded_data_has_a_prompt_or_engine_error_for_every_shape(kind: str, template: str) -> None:
    kept = ENGINES[kind]["prompts"][template]
    assert set(kept) >= {shape.name for shape in SHAPES}, "make the data again"
    assert all("Error" in prompt["error"] for prompt in kept.values() if not isinstance(prompt, str))


@pytest.mark.parametrize(
    ("kind", "template", "shape", "expected"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2].name}") for case in rendered_by_engines()],
)
def test_rendered_prompts_equal_the_engines_recorded_prompts(
    kind: str, template: str, shape: Shape, expected: str
) -> None:
    assert rendered(kind, _TEMPLATES[template], shape) == expected


KEYS = st.permutations(["name", "description", "parameters", "strict"])


@given(
    function=KEYS,
    outer=st.permutations(["type", "function"]),
    missing=st.sets(st.sampled_from(["description", "strict"])),
)
def test_vllm_prompts_ignore_the_key_order_of_tools(
    function: list[str], outer: list[str], missing: set[str]
) -> None:
    fields = {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}, "strict": True}

    def prompt(function_keys: list[str], keys: list[str]) -> str:
        of_tool = {
            "type": "function",
            "function": {key: fields[key] for key in function_keys if key not in missing},
        }
        tools = [{key: of_tool[key] for key in keys}]
        shape = Shape("", CallRoute.CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": tools})
        return rendered("vllm", _TEMPLATES["text"], shape)

    assert prompt(function, outer) == prompt([*fields], ["type", "function"])


def test_media_parts_have_placeholders_equal_for_equal_images() -> None:
    def shown(image: str, kind: str) -> Prompt:
        parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": image}}]
        fields = PromptFields(messages=[{"role": "user", "content": parts}])
        return prompt_maker(kind)(fields, TemplateTraits())

    for kind in ("vllm", "sglang", "trtllm"):
        assert shown("a", kind).has_media
        assert shown("a", kind) == shown("a", kind) != shown("b", kind)
        content = shown("x" * 1_000_000, kind).messages[0]["content"]
        assert isinstance(content, str)
        assert len(content) < 100


def test_tool_call_arguments_are_bounded_for_vllm_and_sglang() -> None:
    deep = '{"a":' * (DEPTH_MAX + 1) + "1" + "}" * (DEPTH_MAX + 1)
    many = '{"a":[' + ",".join(["0"] * (ARGUMENT_VALUES_MAX + 1)) + "]}"
    for arguments in (deep, many):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        fields = PromptFields(messages=[{"role": "assistant", "tool_calls": [call]}])
        for kind in ("vllm", "sglang"):
            with pytest.raises(InvalidRequest, match="all together at most"):
                prompt_maker(kind)(fields, TemplateTraits())


_WORDS = st.sampled_from(
    ["role", "content", "type", "text", "name", "tool_calls", "summary", "input", "id", "output"]
)
_VALUES = st.sampled_from(
    ["user", "assistant", "system", "developer", "tool", "text", "reasoning", "message", "x", ""]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | _VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from([CallRoute.CHAT, CallRoute.RESPONSES, CallRoute.MESSAGES]),
    st.sampled_from(["vllm", "sglang", "trtllm"]),
    st.lists(st.dictionaries(_WORDS, _JSON, max_size=4) | _JSON, max_size=3) | _JSON,
    _JSON,
)
@example(CallRoute.MESSAGES, "sglang", [{"role": "user", "content": []}], None)
@example(CallRoute.RESPONSES, "sglang", [{"type": "reasoning", "summary": []}], None)
def test_any_chat_gives_a_prompt_or_invalid_request(
    route: CallRoute, kind: str, messages: object, other: object
) -> None:
    name = "input" if route is CallRoute.RESPONSES else "messages"
    fields = PromptFields(route=route, system=other, instructions=other, tools=other, **{name: messages})
    with contextlib.suppress(InvalidRequest):
        prompt_maker(kind)(fields, TemplateTraits())
