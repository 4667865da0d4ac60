"""Makes prompts as vLLM does before it renders its template, by the source of 0.32.

A chat, a call of OpenAI's Responses and one of Anthropic's Messages become the same list of messages with a
few known fields each, and tools with the fields of the request model, in its order.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from kvrouter.core.requests import CallRoute
from kvrouter.text.prompts.fields import (
    Arguments,
    Chat,
    Message,
    Pieces,
    Prompt,
    PromptFields,
    TemplateTraits,
    media_text,
    objects,
    ordered,
    template_names,
    text_of,
    wrong,
)

TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""Types of text parts, and the field with the text."""

_DROPPED_PART_FIELDS = frozenset({"type", "text", "refusal", "thinking", "closed", "name", "uuid"})
"""Fields of a part that the template does not get besides the text."""

_BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's line in system prompts, which differs with every call; vLLM drops it."""

_ENDS_OPEN = ("in_progress", "incomplete")


def as_chat(fields: PromptFields, traits: TemplateTraits, pieces: Pieces) -> Chat:
    """Return the chat that vLLM makes of a call of any route. Raises InvalidRequest."""
    names = template_names(fields.chat_template_kwargs)
    effort = fields.reasoning_effort
    continues, add_generation_prompt = False, True
    if fields.route is CallRoute.RESPONSES:
        messages: object = _of_responses(fields, pieces)
        tools: object = _functions_of_responses(fields.tools)
        continues = _is_open(fields.input)
        add_generation_prompt = not continues
        effort = fields.reasoning.get("effort") if isinstance(fields.reasoning, dict) else None
    elif fields.route is CallRoute.MESSAGES:
        messages = _of_messages(fields, pieces, merges_system=traits.raises_on_inline_system)
        tools = _functions_of_messages(fields)
        effort = _effort_of_messages(fields, traits)
    else:
        messages = fields.messages
        tools = fields.tools
        continues = fields.continue_final_message is True
        add_generation_prompt = fields.add_generation_prompt is not False
        if isinstance(fields.documents, list):
            names["documents"] = fields.documents
    if effort is not None and effort != "auto":
        names.setdefault("enable_thinking", effort != "none")
        names["reasoning_effort"] = effort
    for name in ("add_generation_prompt", "continue_final_message"):
        names.pop(name, None)
    return Chat(messages, tools, names, add_generation_prompt=add_generation_prompt, continues=continues)


def make_prompt(fields: PromptFields, traits: TemplateTraits) -> Prompt:
    """Return the prompt that vLLM passes to its template. Raises InvalidRequest."""
    pieces = Pieces()
    chat = as_chat(fields, traits, pieces)
    is_ordered = fields.route is not CallRoute.RESPONSES
    templated, has_media = _conversation(chat.messages, traits, is_ordered=is_ordered)
    return Prompt(
        templated,
        [*_tools(chat.tools)] or None,
        chat.names,
        add_generation_prompt=chat.add_generation_prompt and pieces.is_complete,
        continues=chat.continues and pieces.is_complete,
        has_media=has_media,
        is_complete=pieces.is_complete,
    )


# --- messages


def _conversation(
    messages: object, traits: TemplateTraits, *, is_ordered: bool
) -> tuple[list[Mapping[str, object]], bool]:
    """Return messages as a template gets them, and whether some part is not text. With ``is_ordered``, tool
    calls have the field order of the request model of chats. Raises InvalidRequest.
    """
    reader = _Reader(as_parts=traits.loops_over_content, is_ordered=is_ordered)
    read = [reader.message(message, at) for message, at in objects(messages, "messages")]
    if not traits.names_developer and any(message["role"] == "developer" for message in read):
        read = _merged_system([_as_system(message) for message in read])
    return read, reader.has_media


class _Reader:
    """Reads the messages of one chat."""

    def __init__(self, *, as_parts: bool, is_ordered: bool) -> None:
        self._as_parts = as_parts
        self._is_ordered = is_ordered
        self._arguments = Arguments()
        self.has_media = False

    def message(self, message: Mapping[str, object], path: str) -> Mapping[str, object]:
        role = text_of(message.get("role"), f"{path}.role")
        out: Message = {"role": role, "content": self._content(message.get("content"), role, path)}
        if role == "assistant":
            if message.get("tool_calls"):
                out["tool_calls"] = self._calls(message["tool_calls"], f"{path}.tool_calls")
            reasoning = message.get("reasoning")
            reasoning = message.get("reasoning_content") if reasoning is None else reasoning
            if reasoning is not None:
                out["reasoning"] = out["reasoning_content"] = reasoning
        elif role == "tool":
            if "tool_call_id" in message:
                out["tool_call_id"] = message["tool_call_id"]
            content = out["content"]
            if isinstance(content, list) and all(part["type"] == "text" for part in content):
                out["content"] = "\n".join(part["text"] for part in content)
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                out[name] = message[name]
        if role == "developer":
            out["tools"] = message.get("tools")
        return out

    def _content(self, content: object, role: str, path: str) -> str | list[Message]:
        if content is None:
            parts: Sequence[object] = []
        elif isinstance(content, str):
            parts = [content]
        elif isinstance(content, list):
            parts = content
        else:
            raise wrong(f"{path}.content", "must be a string or a list of parts")
        if role == "system":
            parts = [kept for part in parts if (kept := _without_billing(part)) is not None]
        read = [
            known for at, part in enumerate(parts) if (known := self._part(part, f"{path}.content[{at}]"))
        ]
        return read if self._as_parts else "\n".join(str(part.get("text", part.get("name"))) for part in read)

    def _part(self, part: object, path: str) -> Message | None:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise wrong(path, "must be a string or an object")
        kind = part.get("type")
        field = TEXT_OF_PART.get(kind) if isinstance(kind, str) and part.get("uuid") is None else None
        if field is None:
            self.has_media = True
            return {"type": "text", "text": media_text(part)}
        if part.get(field) is None and kind in ("text", "refusal"):
            return None
        text = text_of(part.get(field), f"{path}.{field}")
        if kind == "tool_reference":
            return {"type": kind, "name": text}
        return {"type": "text", "text": text} | {
            name: value for name, value in part.items() if name not in _DROPPED_PART_FIELDS
        }

    def _calls(self, calls: object, path: str) -> list[Message]:
        return [self._call(call, at) for call, at in objects(calls, path)]

    def _call(self, call: Mapping[str, object], path: str) -> Message:
        function = call.get("function")
        if not isinstance(function, dict):
            raise wrong(f"{path}.function", "must be an object with a name and arguments")
        arguments = self._arguments.coerced(function.get("arguments"), f"{path}.function.arguments")
        known = {**function, "arguments": arguments}
        if not self._is_ordered:
            return {**call, "function": known}
        return ordered(
            {**call, "function": ordered(known, ("arguments", "name"))}, ("id", "function", "type")
        )


def _without_billing(part: object) -> object:
    """Return a part of a system message without Claude Code's line; None if nothing else is left."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
        return part
    remainder = text.partition("\n")[2]
    if not remainder:
        return None
    return {**part, "text": remainder} if isinstance(part, dict) else remainder


def _as_system(message: Mapping[str, object]) -> Mapping[str, object]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _merged_system(messages: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return the messages with all system messages merged into a first one, unless only the first is one."""
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    texts = [_joined(message.get("content")) for message in messages if message["role"] == "system"]
    merged: Message = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _joined(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content or "")


# --- tools


def _tools(tools: object) -> Iterator[Message]:
    """Yield a chat's tools with the fields of the request model, in its order. Raises InvalidRequest."""
    for tool, path in objects(tools, "tools") if isinstance(tools, list) and tools else ():
        function = tool.get("function")
        if not isinstance(function, dict):
            raise wrong(f"{path}.function", "must be an object")
        deferred = tool.get("defer_loading")
        written: Message = {name: function.get(name) for name in ("name", "description", "parameters")}
        for name, value in (
            ("strict", function.get("strict")),
            ("defer_loading", function.get("defer_loading", deferred)),
        ):
            if value is not None:
                written[name] = value
        message: Message = {"type": "function", "function": written}
        yield message if deferred is None else {**message, "defer_loading": deferred}


# --- OpenAI's Responses


def _of_responses(fields: PromptFields, pieces: Pieces) -> list[Message]:
    """Return the messages of a call of Responses. Raises InvalidRequest."""
    messages: list[Message] = []
    if isinstance(fields.instructions, str) and fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for piece in pieces.known(objects(fields.input, "input"), _of_item):
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None or not _merges(last, piece):
            messages.append(piece)
    return messages


def _merges(last: Message, piece: Message) -> bool:
    """Merge an assistant's message into the last one if that lacks its field; return whether it did."""
    if piece["role"] != "assistant":
        return False
    calls = piece.get("tool_calls")
    if isinstance(calls, list):
        before = last.setdefault("tool_calls", [])
        if isinstance(before, list):
            before.extend(calls)
        return True
    field = "reasoning" if "reasoning" in piece else "content"
    if last.get(field) is not None or len(piece) != 2:
        return False
    last[field] = piece[field]
    return True


def _of_item(item: Mapping[str, object], path: str) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        name = text_of(item.get("name"), f"{path}.name")
        namespace = item.get("namespace")
        if isinstance(namespace, str) and namespace:
            name = f"{namespace}__{name}"
        return _calling(item, name, item.get("arguments"))
    if kind == "custom_tool_call":
        return _calling(item, item.get("name"), {"input": item.get("input") or ""})
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        found = item.get("content") or item.get("summary") or ()
        first = found[0] if isinstance(found, list) and found else {}
        return {"role": "assistant", "reasoning": first.get("text", "") if isinstance(first, dict) else ""}
    if kind != "message" or "role" not in item:
        raise wrong(f"{path}.type", f"is no message: {kind!r}")
    content = item.get("content")
    if item["role"] == "assistant":
        if isinstance(content, list) and content and isinstance(content[0], dict):
            content = content[0].get("text")
        if isinstance(content, str):
            return {"role": "assistant", "content": content}
    return dict(item)


def _calling(item: Mapping[str, object], name: object, arguments: object) -> Message:
    call: Message = {
        "id": item.get("call_id"),
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }
    return {"role": "assistant", "tool_calls": [call]}


def _is_open(items: object) -> bool:
    """Whether the last item is an incomplete answer, which the engine continues."""
    last = items[-1] if isinstance(items, list) and items else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in _ENDS_OPEN
    )


def _functions_of_responses(tools: object) -> list[Message]:
    found: list[Message] = []
    for tool, path in objects(tools, "tools") if isinstance(tools, list) and tools else ():
        if tool.get("type") == "namespace":
            for inner, _ in objects(tool.get("tools"), f"{path}.tools"):
                if inner.get("type") == "function":
                    found.append({"function": {**inner, "name": f"{tool.get('name')}__{inner.get('name')}"}})
        elif tool.get("type") == "custom":
            parameters = custom_parameters()
            found.append({"function": {**tool, "parameters": parameters}})
        elif tool.get("type") == "function":
            found.append({"function": tool})
    return found


def custom_parameters() -> Message:
    """Return the parameter schema of a tool that takes free text."""
    payload = {"type": "string", "description": "The freeform text payload for this tool."}
    return {
        "type": "object",
        "properties": {"input": payload},
        "required": ["input"],
        "additionalProperties": False,
    }


# --- Anthropic's Messages


def _of_messages(fields: PromptFields, pieces: Pieces, *, merges_system: bool) -> list[Message]:
    """Return the messages of a call of Anthropic's Messages. Raises InvalidRequest."""
    system = _system_texts(fields.system)
    items = [*objects(fields.messages, "messages")]
    if merges_system:
        for message, _ in items:
            if message.get("role") == "system":
                system += _system_texts(message.get("content"))
    messages: list[Message] = [{"role": "system", "content": "".join(system)}] if system else []

    def read(message: Mapping[str, object], path: str) -> list[Message]:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            inline = "" if merges_system else "".join(_system_texts(content))
            return [{"role": role, "content": inline}] if inline else []
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        return _of_blocks(role, content, f"{path}.content")

    return [*messages, *chain.from_iterable(pieces.known(items, read))]


def _system_texts(content: object) -> list[str]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [
        block.get("text")
        for block in (blocks if isinstance(blocks, list) else ())
        if isinstance(block, dict) and block.get("type") == "text"
    ]
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(_BILLING_HEADER)]


def _of_blocks(role: object, content: object, path: str) -> list[Message]:
    """Return the chat messages of one message in blocks, with tool results first."""
    results: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block, at in objects(content, path) if content else ():
        kind = block.get("type")
        if kind == "text":
            parts.extend([{"type": "text", "text": block["text"]}] if block.get("text") else [])
        elif kind == "image":
            parts.append({"type": "image_url", "source": block.get("source")})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(text_of(block["thinking"], f"{at}.thinking"))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            results.extend(_of_result(block))
        elif kind == "tool_result":
            text = str(block["content"]) if block.get("content") else ""
            parts.append({"type": "text", "text": f"Tool result: {text}"})
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_text else parts
    return results if role == "user" and not parts else [*results, message]


def _of_result(block: Mapping[str, object]) -> Iterator[Message]:
    content = block.get("content")
    items = content if isinstance(content, list) else []
    known = [item for item in items if isinstance(item, dict)]
    texts = [item.get("text", "") for item in known if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(map(str, texts))
    of_tool: Message = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    yield {**of_tool, "content": text}
    images = [item for item in known if item.get("type") == "image"]
    if images:
        yield {
            "role": "user",
            "content": [{"type": "image_url", "source": item.get("source")} for item in images],
        }
    named = [
        item.get("tool_name") or item.get("name") for item in known if item.get("type") == "tool_reference"
    ]
    references = [{"type": "tool_reference", "name": name} for name in named if name]
    if references:
        yield {**of_tool, "content": references}


def _functions_of_messages(fields: PromptFields) -> list[Message]:
    return [
        {
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": typed_schema(tool.get("input_schema")),
                "strict": tool.get("strict"),
                "defer_loading": tool.get("defer_loading"),
            }
        }
        for tool in _tools_in_effect(fields)
    ]


def _tools_in_effect(fields: PromptFields) -> list[Mapping[str, object]]:
    """Return a call's tools after the additions and removals in its messages."""
    tools = [tool for tool, _ in objects(fields.tools, "tools")] if fields.tools else []
    changes = [
        block
        for message, _ in objects(fields.messages, "messages")
        for block in _list(message.get("content"))
        if isinstance(block, dict) and block.get("type") in ("tool_addition", "tool_removal")
    ]
    if not changes:
        return tools
    by_name = {str(tool.get("name")): tool for tool in tools}
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            raise wrong("messages", "a change of tools must name a tool")
        definition = change.get("definition")
        name = str((definition if isinstance(definition, dict) else change).get("name"))
        if isinstance(definition, dict):
            by_name[name] = definition
        elif block["type"] == "tool_addition" and name in by_name:
            by_name[name] = {**by_name[name], "defer_loading": None}
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in by_name.items() if name not in removed]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def typed_schema(schema: object) -> object:
    """Return a tool's schema, with the type ``object`` if it has none."""
    return {**schema, "type": "object"} if isinstance(schema, dict) and "type" not in schema else schema


def _effort_of_messages(fields: PromptFields, traits: TemplateTraits) -> object:
    if isinstance(fields.thinking, dict) and fields.thinking.get("type") == "disabled":
        return "low" if traits.thinks_without_effort else "none"
    return fields.output_config.get("effort") if isinstance(fields.output_config, dict) else None
