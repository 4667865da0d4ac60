"""Calls of OpenAI's and Anthropic's own packages, run by the engines' Python, which has both.

    python sdk_calls.py URL MODEL

Prints a line of JSON for each: what it does, and what its caller was given, or the error that was raised.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anthropic
import openai

URL, MODEL = sys.argv[1:]
CHAT: Any = [{"role": "user", "content": "Grüße 你好 🦙: where is my cache?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "find_blocks",
        "description": "Finds KV blocks.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["a", "b"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {"name": "place", "schema": TOOL["function"]["parameters"]}
CLAUDES_TOOL: Any = {
    "name": "find_blocks",
    "description": "Finds KV blocks.",
    "input_schema": TOOL["function"]["parameters"],
}

gpt = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["e"]},
    "tools": {"tools": [TOOL], "tool_choice": "none"},
    "named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find_blocks"}}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "token ids": {"extra_body": {"return_token_ids": True}},
    "a field of tomorrow": {"extra_body": {"of_tomorrow": [1]}},
    "developer": {"messages": [{"role": "developer", "content": "be brief"}, *CHAT]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}]},
    "too long": {"messages": [{"role": "user", "content": "word " * 3000}]},
    "too many tokens": {"max_tokens": 100_000},
    "too hot": {"temperature": 9},
    "unknown role": {"messages": [{"role": "alien", "content": "x"}]},
}
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 1},
    {"echo": True},
    {"prompt": [5, 6, 7]},
    {"prompt": ["a", "b"]},
)
RESPONSES: dict[str, dict[str, Any]] = {"plain": {}, "instructions": {"instructions": "Be brief."}}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": "Be brief.", "stop_sequences": ["e"]},
    "tool": {"tools": [CLAUDES_TOOL], "tool_choice": {"type": "tool", "name": "find_blocks"}},
    "too many tokens": {"max_tokens": 100_000},
}
USAGE = {"stream_options": {"include_usage": True}}


def chat(**more: Any) -> object:
    return gpt.chat.completions.create(
        **{"model": MODEL, "messages": CHAT, "max_tokens": 24, "temperature": 0, **more}
    )


def chat_text() -> str:
    """As a caller writes it who was never sent an event without content."""
    events: Any = chat(stream=True, max_tokens=48)
    return "".join(event.choices[0].delta.content for event in events)


def completion(**more: Any) -> object:
    return gpt.completions.create(
        **{"model": MODEL, "prompt": "def route(", "max_tokens": 12, "temperature": 0, **more}
    )


def response(**more: Any) -> object:
    return gpt.responses.create(
        **{"model": MODEL, "input": "Where is it?", "max_output_tokens": 12, "temperature": 0, **more}
    )


def message(**more: Any) -> object:
    return claude.messages.create(
        **{"model": MODEL, "messages": CHAT, "max_tokens": 16, "temperature": 0, **more}
    )


def message_text() -> object:
    with claude.messages.stream(model=MODEL, messages=CHAT, max_tokens=24, temperature=0) as stream:
        return ["".join(stream.text_stream), stream.get_final_message()]


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every call by its name."""
    for name, more in CHATS.items():
        yield f"chat {name}", partial(chat, **more)
        yield f"chat {name}, streamed", partial(chat, stream=True, **USAGE, **more)
    yield "chat text", chat_text
    for index, more in enumerate(COMPLETIONS):
        yield f"completion {index}", partial(completion, **more)
        if more.get("prompt") is None:
            yield f"completion {index}, streamed", partial(completion, stream=True, **more)
    for name, more in RESPONSES.items():
        yield f"response {name}", partial(response, **more)
        yield f"response {name}, streamed", partial(response, stream=True, **more)
    for name, more in MESSAGES.items():
        yield f"message {name}", partial(message, **more)
        yield f"message {name}, streamed", partial(message, stream=True, **more)
    yield "message text", message_text
    yield "count", lambda: claude.messages.count_tokens(model=MODEL, messages=CHAT)
    yield "models", lambda: gpt.models.list().data
    yield "unknown model", lambda: chat(model="nobody's")
    yield "embeddings", lambda: gpt.embeddings.create(model=MODEL, input="a")


def given(call: Callable[[], object]) -> object:
    """What the caller is given, as JSON: of a stream every event."""
    try:
        answer = call()
        if isinstance(answer, openai.Stream | anthropic.Stream):
            return [_json(event) for event in answer]
        return _json(answer)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return [type(error).__name__, error.status_code, error.body]
    except TypeError as error:
        return [type(error).__name__, str(error)]


def _json(value: Any) -> object:
    if isinstance(value, list):
        return [_json(inner) for inner in value]
    return value.model_dump(warnings=False) if hasattr(value, "model_dump") else value


for name, call in calls():
    print(json.dumps([name, given(call)]), flush=True)
