"""Calls of many shapes: what clients write of roles, tools and contents, on three routes.

:func:`lengthened` gives one a long beginning of its own: whole blocks that an engine finds again.
"""

import json
from typing import Any, NamedTuple

from kvrouter.core.requests import CallRoute

Body = dict[str, Any]


class Shape(NamedTuple):
    """A call without its model."""

    name: str
    route: CallRoute
    body: Body


_LONG = "and so on"


def lengthened(shape: Shape, words: int) -> Shape:
    """Return a shape whose beginning has so many words."""
    text = json.dumps(shape.body).replace(_LONG, " ".join(f"rule {n}" for n in range(words // 2)))
    return shape._replace(body=json.loads(text))


def _long(name: str) -> str:
    return f"{name} {_LONG}"


def _schema(name: str) -> Body:
    described = {"type": "string", "description": _long(name)}
    return {"type": "object", "properties": {"q": described, "n": {"type": "integer"}}, "required": ["q"]}


def _user(text: str = "hello") -> Body:
    return {"role": "user", "content": text}


def _text(text: str, **more: Any) -> Body:
    return {"type": "text", "text": text, **more}


def _call(arguments: str = '{"q": "a", "n": 1}', **more: Any) -> Body:
    return {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}, **more}


def _result(content: Any = "four", **more: Any) -> Body:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **more}


def _tool(name: str, *keys: str, **more: Any) -> Body:
    fields = {"name": "look", "description": "Looks.", "parameters": _schema(name), "strict": True}
    return {"type": "function", "function": {key: fields[key] for key in keys}, **more}


def _chat(name: str, *messages: Body, **more: Any) -> Shape:
    return Shape(name, CallRoute.CHAT, {"messages": [*messages], **more})


def _tooled(name: str, *keys: str, **more: Any) -> Shape:
    return _chat(name, _user(), tools=[_tool(name, *keys, **more)])


def _responses(name: str, **body: Any) -> Shape:
    return Shape(name, CallRoute.RESPONSES, body)


def _messages(name: str, *messages: Body, **more: Any) -> Shape:
    return Shape(name, CallRoute.MESSAGES, {"messages": [*messages], **more})


CHATS = (
    _chat("chat-user", _user(_long("chat-user"))),
    _chat("chat-system", {"role": "system", "content": _long("chat-system")}, _user()),
    _chat("chat-developer", {"role": "developer", "content": _long("chat-developer")}, _user()),
    _chat(
        "chat-developer-late",
        _user(_long("chat-developer-late")),
        {"role": "assistant", "content": "yes"},
        {"role": "developer", "content": "be brief"},
        _user(),
    ),
    _chat(
        "chat-system-and-developer",
        {"role": "system", "content": _long("chat-system-and-developer")},
        {"role": "developer", "content": [_text("one"), _text("two")]},
        _user(),
    ),
    _chat("chat-parts", {"role": "user", "content": [_text(_long("chat-parts")), _text("and more")]}),
    _chat(
        "chat-parts-marked",
        {"role": "user", "content": [_text(_long("chat-parts-marked"), cache_control={"type": "ephemeral"})]},
    ),
    _chat(
        "chat-parts-keys", {"content": [{"text": _long("chat-parts-keys"), "type": "text"}], "role": "user"}
    ),
    _chat(
        "chat-assistant-parts",
        _user(_long("chat-assistant-parts")),
        {"role": "assistant", "content": [_text("a"), {"type": "refusal", "refusal": "no"}]},
        _user(),
    ),
    _chat("chat-names", {**_user(_long("chat-names")), "name": "bob"}, {**_user(), "name": "eve"}),
    _chat("chat-null-fields", {**_user(_long("chat-null-fields")), "tool_calls": None}, tools=None),
    _chat("chat-unknown-fields", {**_user(_long("chat-unknown-fields")), "mood": "good", "weight": 2}),
    _chat(
        "chat-reasoning",
        _user(_long("chat-reasoning")),
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        _user(),
    ),
    _chat(
        "chat-billing",
        {"role": "system", "content": f"x-anthropic-billing-header: 1\n{_long('chat-billing')}"},
        _user(),
    ),
    _tooled("tool-plain", "name", "description", "parameters"),
    _tooled("tool-parameters-first", "parameters", "description", "name"),
    _tooled("tool-pydantic", "name", "strict", "parameters", "description"),
    _tooled("tool-strict-last", "name", "description", "parameters", "strict"),
    _tooled("tool-without-description", "name", "parameters"),
    _tooled("tool-type-last", "name", "parameters", "description"),
    _tooled("tool-deferred", "description", "name", "parameters", defer_loading=True),
    _chat(
        "tool-nulls",
        _user(_long("tool-nulls")),
        tools=[{"type": "function", "function": {"name": "f", "description": None, "strict": None}}],
    ),
    _chat("tool-name-only", _user(_long("tool-name-only")), tools=[_tool("", "name")]),
    _chat(
        "tool-unknown-fields",
        _user(),
        tools=[
            {
                "function": {"returns": 1, **_tool("tool-unknown-fields", "parameters", "name")["function"]},
                "type": "function",
                "x": 1,
            }
        ],
    ),
    _chat(
        "tool-several",
        _user(),
        tools=[_tool("tool-several", "name", "parameters"), _tool("b", "description", "name", "parameters")],
    ),
    _chat(
        "tool-choice-none",
        _user(_long("tool-choice-none")),
        tools=[_tool("c", "name", "parameters")],
        tool_choice="none",
    ),
    _chat(
        "called",
        _user(_long("called")),
        {"role": "assistant", "content": None, "tool_calls": [_call()]},
        _result(),
        tools=[_tool("called", "description", "parameters", "name")],
    ),
    _chat(
        "called-keys",
        _user(_long("called-keys")),
        {
            "tool_calls": [
                {
                    "function": {"arguments": "{}", "name": "look"},
                    "type": "function",
                    "id": "call_1",
                    "index": 0,
                }
            ],
            "role": "assistant",
            "content": "",
        },
        _result([_text("a"), _text("b")]),
    ),
    _chat(
        "called-not-json",
        _user(_long("called-not-json")),
        {"role": "assistant", "tool_calls": [_call("{not json"), _call("[1]")]},
        _result(name="look"),
    ),
    _chat(
        "called-none",
        _user(_long("called-none")),
        {"role": "assistant", "content": "a", "tool_calls": []},
        _user(),
    ),
    _chat(
        "called-unicode",
        _user(_long("called-unicode")),
        {"role": "assistant", "tool_calls": [_call('{"q":"\\u00e9\\ud83d\\ude00","n":1.50}')]},
        _result("é😀"),
    ),
    _chat(
        "chat-no-generation-prompt", _user(_long("chat-no-generation-prompt")), add_generation_prompt=False
    ),
    _chat(
        "chat-template-names",
        _user(_long("chat-template-names")),
        chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": False},
    ),
    _chat("chat-effort", _user(_long("chat-effort")), reasoning_effort="low"),
    _chat("chat-documents", _user(_long("chat-documents")), documents=[{"title": "t", "text": "x"}]),
    _chat(
        "chat-continued",
        _user(_long("chat-continued")),
        {"role": "assistant", "content": "The answer is "},
        add_generation_prompt=False,
        continue_final_message=True,
    ),
)

_FLAT_TOOL = {"type": "function", "name": "look", "description": "Looks."}

RESPONSES = (
    _responses("responses-input", input=_long("responses-input")),
    _responses("responses-instructions", instructions=_long("responses-instructions"), input="hello"),
    _responses(
        "responses-developer", input=[{"role": "developer", "content": _long("responses-developer")}, _user()]
    ),
    _responses(
        "responses-parts",
        input=[
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": _long("responses-parts")},
                    {"type": "input_text", "text": "b"},
                ],
            }
        ],
    ),
    _responses(
        "responses-turns",
        instructions=_long("responses-turns"),
        input=[
            _user(),
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            _user("more"),
        ],
    ),
    _responses(
        "responses-tool", input="hello", tools=[{**_FLAT_TOOL, "parameters": _schema("responses-tool")}]
    ),
    _responses(
        "responses-tool-strict",
        input="hello",
        tools=[{**_FLAT_TOOL, "strict": True, "parameters": _schema("responses-tool-strict")}],
    ),
    _responses(
        "responses-tool-bare",
        input="hello",
        tools=[{"parameters": _schema("responses-tool-bare"), "name": "f", "type": "function"}],
    ),
    _responses(
        "responses-called",
        input=[
            _user(_long("responses-called")),
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": "a"}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "four"},
            {"type": "function_call_output", "call_id": "c2", "output": "five"},
        ],
    ),
    _responses(
        "responses-custom",
        input=_long("responses-custom"),
        tools=[{"type": "custom", "name": "write", "description": "Writes."}],
    ),
)

_NAMED_TOOL = {"name": "look", "description": "Looks."}

MESSAGES = (
    _messages("messages-text", _user(_long("messages-text"))),
    _messages("messages-system", _user(), system=_long("messages-system")),
    _messages(
        "messages-system-blocks",
        _user(),
        system=[_text("x-anthropic-billing-header: 2"), _text(_long("messages-system-blocks")), _text("b")],
    ),
    _messages("messages-blocks", {"role": "user", "content": [_text(_long("messages-blocks")), _text("b")]}),
    _messages("messages-tool", _user(), tools=[{**_NAMED_TOOL, "input_schema": _schema("messages-tool")}]),
    _messages(
        "messages-tool-bare",
        _user(),
        tools=[{"input_schema": {"properties": _schema("messages-tool-bare")["properties"]}, "name": "f"}],
    ),
    _messages(
        "messages-called",
        _user(_long("messages-called")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                _text("I look."),
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [_text("four"), _text("five")]},
                _text("go on"),
            ],
        },
    ),
    _messages("messages-not-thinking", _user(_long("messages-not-thinking")), thinking={"type": "disabled"}),
    _messages(
        "messages-inline-system",
        _user(_long("messages-inline-system")),
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": "be brief"},
        _user(),
    ),
)

SHAPES: tuple[Shape, ...] = (*CHATS, *RESPONSES, *MESSAGES)
