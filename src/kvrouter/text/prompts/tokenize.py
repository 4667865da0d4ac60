"""Bodies for an engine's ``/tokenize``."""

from collections.abc import Mapping

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import CallRoute
from kvrouter.text.prompts import sglang, vllm
from kvrouter.text.prompts.fields import PLAIN_TEMPLATE, Pieces, PromptFields

_TEXT_PARTS = frozenset(vllm.TEXT_OF_PART)

CHAT_READERS = {"vllm": vllm.as_chat, "sglang": sglang.as_chat, "trtllm": vllm.as_chat}
"""How each kind of engine in the registry reads a call as a chat; others, as the mock, have vLLM's way."""


def tokenize_chat(fields: PromptFields, engine_kind: str) -> bytes | None:
    """Return the body for a call as a chat of this engine kind; None if ``/tokenize`` would not cover the
    whole prompt, because a part is an image or unknown here.

    The engine applies the conversions of contents and roles that depend on the template.
    """
    pieces = Pieces()
    as_chat = CHAT_READERS.get(engine_kind, vllm.as_chat)
    is_vllm = as_chat is vllm.as_chat
    try:
        chat = as_chat(fields, PLAIN_TEMPLATE, pieces)
    except InvalidRequest:
        return None
    if not pieces.is_complete or not isinstance(chat.messages, list) or _has_media(chat.messages):
        return None
    is_chat = fields.route is CallRoute.CHAT
    messages = [_written(message, is_vllm=is_vllm, is_chat=is_chat) for message in chat.messages]
    body: dict[str, object] = {"messages": messages}
    if chat.tools:
        body["tools"] = chat.tools if is_chat else [{"type": "function", **tool} for tool in chat.tools]
    if chat.names:
        body["chat_template_kwargs"] = chat.names
    if chat.tool_choice is not None:
        body["tool_choice"] = chat.tool_choice
    if chat.continues:
        body["continue_final_message"] = True
    if not chat.add_generation_prompt:
        body["add_generation_prompt"] = False
    return msgspec.json.encode(body)


def tokenize_text(text: str) -> bytes:
    """Return the body for the prompt of a completion."""
    return msgspec.json.encode({"prompt": text})


def _has_media(messages: list[object]) -> bool:
    """Whether some part of a message is not text; the engine checks everything else."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(
        isinstance(part, Mapping) and (part.get("type") not in _TEXT_PARTS or part.get("uuid") is not None)
        for part in parts
    )


def _written(message: object, *, is_vllm: bool, is_chat: bool) -> object:
    """Return a message in the form of chats. vLLM renames ``reasoning_content`` in chats, but not at
    ``/tokenize``; other routes may have arguments as objects, and other names of text types.
    """
    if not isinstance(message, Mapping):
        return message
    written = dict(message)
    if is_vllm and "reasoning_content" in written:
        reasoning = written.pop("reasoning_content")
        if written.get("reasoning") is None:
            written["reasoning"] = reasoning
    content, calls = written.get("content"), written.get("tool_calls")
    if not is_chat and isinstance(content, list):
        written["content"] = [
            {**part, "type": "text"} if part.get("type") in _TEXTS_OF_RESPONSES else part for part in content
        ]
    if not is_chat and isinstance(calls, list):
        written["tool_calls"] = [_written_call(call) for call in calls]
    return written


_TEXTS_OF_RESPONSES = ("input_text", "output_text")


def _written_call(call: Mapping[str, object]) -> Mapping[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    arguments = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {**call, "function": {**function, "arguments": arguments}}
