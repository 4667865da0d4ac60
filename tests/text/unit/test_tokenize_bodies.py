"""What engines are asked at ``/tokenize`` is the same prompt as the call's own."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import msgspec
import pytest

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import CallRoute
from kvrouter.text.prompts import prompt_maker
from kvrouter.text.prompts.fields import PLAIN_TEMPLATE, Prompt, PromptFields, TemplateTraits
from kvrouter.text.prompts.tokenize import tokenize_chat
from tests.testing.prompt_shapes import SHAPES, Shape

TRAITS = {
    "plain": PLAIN_TEMPLATE,
    "parts": TemplateTraits(loops_over_content=True, takes_parts=True, names_developer=True),
}


def asked(fields: PromptFields, kind: str) -> PromptFields | None:
    body = tokenize_chat(fields, kind)
    return None if body is None else PromptFields(**json.loads(body))


def fields_of(shape: Shape) -> PromptFields:
    return msgspec.convert({"route": shape.route, **shape.body}, PromptFields)


def whole_calls() -> Iterator[tuple[Shape, str, str, Prompt]]:
    """The calls that engines take, each with the prompt that is made of it."""
    for shape, kind, traits in product(SHAPES, ("vllm", "sglang", "trtllm"), TRAITS):
        with suppress(InvalidRequest):
            yield shape, kind, traits, prompt_maker(kind)(fields_of(shape), TRAITS[traits])


@pytest.mark.parametrize(
    ("shape", "kind", "traits", "wanted"),
    [pytest.param(*case, id=f"{case[0].name}-{case[1]}-{case[2]}") for case in whole_calls()],
)
def test_tokenize_bodies_make_the_same_prompt_as_the_call(
    shape: Shape, kind: str, traits: str, wanted: Prompt
) -> None:
    again = asked(fields_of(shape), kind)
    assert (again is not None) is wanted.is_complete
    assert again is None or prompt_maker(kind)(again, TRAITS[traits]) == wanted


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u"}]}]},
        {"messages": "hi"},
        {"messages": None},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 5},
        {"route": CallRoute.RESPONSES, "input": [{"type": "item_reference", "id": "x"}]},
        {
            "route": CallRoute.RESPONSES,
            "input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}],
        },
        {"route": CallRoute.RESPONSES, "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"route": CallRoute.MESSAGES, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ],
)
def test_prompts_with_media_have_no_tokenize_body(kind: str, fields: dict[str, Any]) -> None:
    assert asked(PromptFields(**fields), kind) is None
