"""Makes prompts as SGLang does before it renders its template, by the source of 0.5.23.

Null fields are dropped, tools keep the order of the client's keys, and a list of texts is joined by blanks
for a template that takes no lists. The role ``developer`` stays in chats, and becomes a labelled ``system``
in Responses.
"""

import json
from collections.abc import Iterator, Mapping
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
    template_names,
    text_of,
    wrong,
)
from kvrouter.text.prompts.vllm import custom_parameters, typed_schema

_MESSAGE_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")
_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_ONLY_WHERE_SET = frozenset({"strict", "defer_loading"})
_DEVELOPER_LABEL = "Developer instructions:"


def as_chat(fields: PromptFields, traits: TemplateTraits, pieces: Pieces) -> Chat:
    """Return the chat that SGLang makes of a call of any route. Raises InvalidRequest."""
    names = template_names(fields.chat_template_kwargs)
    effort = fields.reasoning_effort
    tool_choice: object = fields.tool_choice
    if fields.route is CallRoute.RESPONSES:
        messages = _of_responses(fields, traits, pieces)
        tools = _tools(_functions_of_responses(fields.tools))
        effort = fields.reasoning.get("effort") if isinstance(fields.reasoning, dict) else None
    elif fields.route is CallRoute.MESSAGES:
        messages = _of_messages(fields, traits, pieces)
        tools = _tools(_functions_of_messages(fields.tools))
        output = fields.output_config
        effort = output.get("effort") if isinstance(output, dict) else None
        effort = "max" if effort == "xhigh" else effort
        choice = tool_choice if isinstance(tool_choice, dict) else {}
        named = {"function": {"name": choice.get("name")}} if choice.get("type") == "tool" else None
        tool_choice = "none" if choice.get("type") == "none" else named
    else:
        messages = [{**message} for message, _ in objects(fields.messages, "messages")]
        tools = _tools(fields.tools)
        if effort is not None:
            names.setdefault("thinking", effort != "none")
            names.setdefault("enable_thinking", effort != "none")
    if effort is not None:
        names.setdefault("reasoning_effort", effort)
    for name in ("add_generation_prompt", "continue_final_message", "tools"):
        names.pop(name, None)
    continues = fields.continue_final_message is True and fields.route is CallRoute.CHAT
    return Chat(messages, tools, names, tool_choice=tool_choice, continues=continues)


def make_prompt(fields: PromptFields, traits: TemplateTraits) -> Prompt:
    """Return the prompt that SGLang passes to its template. Raises InvalidRequest."""
    pieces = Pieces()
    messages, tools, names, tool_choice, _, continues = as_chat(fields, traits, pieces)
    reader = _Reader(as_parts=traits.takes_parts)
    read = [reader.message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    if not read:
        raise wrong("messages", "has nothing to say")
    last = read[-1]
    continuation = ""
    if continues and last["role"] == "assistant" and isinstance(last["content"], str):
        continuation = last["content"]
        del read[-1]
    if (
        last["role"] == "assistant"
        and isinstance(last["content"], str)
        and pieces.is_complete
        and not continues
    ):
        read[-1] = {"role": "user", "content": last["content"]}
    return Prompt(
        read,
        _chosen(tools, tool_choice),
        names,
        add_generation_prompt=pieces.is_complete,
        continuation=continuation,
        has_media=reader.has_media,
        is_complete=pieces.is_complete,
        flat_tools=True,
    )


def _chosen(tools: list[Message], tool_choice: object) -> list[Message] | None:
    """Return the tools that ``tool_choice`` allows, the only ones that the template gets; None without."""
    if tool_choice == "none":
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    if isinstance(function, dict):
        name = function.get("name")
        tools = [tool for tool in tools if _name_of(tool) == name]
    return tools or None


def _name_of(tool: Message) -> object:
    function = tool["function"]
    return function.get("name") if isinstance(function, dict) else None


class _Reader:
    """Reads the messages of one chat."""

    def __init__(self, *, as_parts: bool) -> None:
        self._as_parts = as_parts
        self._arguments = Arguments()
        self.has_media = False

    def message(self, message: Mapping[str, object], path: str) -> Message:
        role = text_of(message.get("role"), f"{path}.role")
        role = role if role == "user" else role.lower()
        content = self._content(message.get("content"), path)
        is_last = isinstance(content, list)  # a list of parts comes after the other fields
        if role == "tool" and isinstance(content, list):
            content = " ".join(str(part["text"]) for part in content) if _are_texts(content) else content
        out: Message = {"role": role, "content": content}
        if role == "user":
            return out
        for name in _MESSAGE_FIELDS:
            value = message.get(name)
            if value is None:
                continue
            if name == "tool_calls":
                calls = objects(value, f"{path}.{name}") if value else ()
                value = [self._call(call, at, role) for call, at in calls]
            elif name == "tools":
                value = _tools(value)
            out[name] = value
        if is_last:
            out["content"] = out.pop("content")
        return out

    def _content(self, content: object, path: str) -> str | list[Message]:
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise wrong(f"{path}.content", "must be a string or a list of parts")
        parts = [
            known for at, part in enumerate(content) if (known := self._part(part, f"{path}.content[{at}]"))
        ]
        if self._as_parts:
            return parts
        return " ".join(str(part["text"]) for part in parts if part["type"] == "text")

    def _part(self, part: object, path: str) -> Message | None:
        if not isinstance(part, dict):
            raise wrong(path, "must be an object with a type")
        kind = part.get("type")
        if kind in ("text", "input_text"):
            return {"type": "text", "text": text_of(part.get("text"), f"{path}.text")}
        if kind in ("thinking", "reasoning"):
            return None
        if kind == "tool_reference":
            return dict(part)
        self.has_media = True
        return {"type": "text", "text": media_text(part)}

    def _call(self, call: Mapping[str, object], path: str, role: str) -> Message:
        function = call.get("function")
        if not isinstance(function, dict):
            raise wrong(f"{path}.function", "must be an object with a name and arguments")
        arguments = function.get("arguments")
        if role == "assistant" and isinstance(arguments, str):
            arguments = self._arguments.decoded(arguments or "null", f"{path}.function.arguments")
            if not isinstance(arguments, dict):
                raise wrong(f"{path}.function.arguments", "must be a JSON object in a string")
        written: Message = {"name": function.get("name"), "arguments": arguments}
        return {
            "id": call.get("id"),
            "index": call.get("index"),
            "type": call.get("type", "function"),
            "function": written,
        }


def _are_texts(parts: list[Message]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _tools(tools: object) -> list[Message]:
    """Return tools with the client's keys, in the client's order, then the other keys."""
    return [_tool(tool, path) for tool, path in objects(tools, "tools")] if tools else []


def _tool(tool: Mapping[str, object], path: str) -> Message:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{path}.function", "must be an object")
    deferred = tool.get("defer_loading")
    known = {name: function.get(name) for name in _FUNCTION_FIELDS}
    if known["defer_loading"] is None:
        known["defer_loading"] = deferred
    order = [name for name in function if name in known]
    order += [name for name in _FUNCTION_FIELDS if name not in function]
    written = {name: known[name] for name in order if known[name] is not None or name not in _ONLY_WHERE_SET}
    return {"type": tool.get("type", "function"), "function": written, "defer_loading": deferred}


# --- OpenAI's Responses


def _of_responses(fields: PromptFields, traits: TemplateTraits, pieces: Pieces) -> list[Message]:
    messages: list[Message] = []
    if isinstance(fields.instructions, str) and fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        messages.append({"role": "user", "content": fields.input})
    else:
        for piece in pieces.known(objects(fields.input, "input"), _of_item):
            if piece is not None:
                _append_merged(messages, piece)
    if traits.keeps_inline_system:
        return messages
    chunks: list[str] = []
    for message in messages:
        if message["role"] == "system":
            content = message.get("content")
            chunks += [content] if isinstance(content, str) else _texts(content)
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(chunks)}, *others] if chunks else others


def _of_item(item: Mapping[str, object], path: str) -> Message | None:
    kind = item.get("type", "message")
    if kind == "function_call":
        arguments = item.get("arguments")
        return _calling(item, _as_object(arguments, path))
    if kind == "custom_tool_call":
        return _calling(item, {"input": item.get("input") or ""})
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output", "")
        if isinstance(output, list):
            output = "".join(str(part.get("text", "")) for part in output if isinstance(part, dict))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        texts = [*_texts(item.get("summary"))] or [*_texts(item.get("content"))]
        if not texts and item.get("encrypted_content"):
            raise wrong(f"{path}.encrypted_content", "is known to the engine alone")
        return {"role": "assistant", "reasoning_content": "\n".join(texts)} if texts else None
    if kind != "message" or "role" not in item:
        raise wrong(f"{path}.type", f"is no message: {kind!r}")
    content = item.get("content")
    if isinstance(content, list):
        content = [_as_chat_part(part) for part in content]
    role = item["role"]
    if role == "developer":
        role, content = "system", _labelled(content)
    kept = {name: value for name, value in item.items() if value is not None}
    return {name: value for name, value in kept.items() if name not in ("id", "status", "type")} | {
        "role": role,
        "content": content,
    }


def _as_chat_part(part: object) -> object:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    return part


def _labelled(content: object) -> object:
    if isinstance(content, str):
        return f"{_DEVELOPER_LABEL}\n{content}"
    if not isinstance(content, list):
        return content
    for at, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            labelled = {**part, "text": f"{_DEVELOPER_LABEL}\n{part['text']}"}
            return [*content[:at], labelled, *content[at + 1 :]]
    return [{"type": "input_text", "text": _DEVELOPER_LABEL}, *content]


def _as_object(arguments: object, path: str) -> Mapping[str, object]:
    """Return the arguments of an earlier call; empty if the model did not write a JSON object."""
    return Arguments().coerced(arguments, f"{path}.arguments")


def _calling(item: Mapping[str, object], arguments: object) -> Message:
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _texts(parts: object) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and text:
            yield text


def _append_merged(messages: list[Message], piece: Message) -> None:
    """Append a message, merged into the last one if both are of the same assistant turn."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or piece["role"] != "assistant":
        messages.append(piece)
        return
    if last.get("phase") != piece.get("phase") and set(last) != {"role", "reasoning_content"}:
        messages.append(piece)
        return
    if piece.get("phase") is not None:
        last["phase"] = piece["phase"]
    content, before = piece.get("content"), last.get("content")
    if content:
        if not before:
            last["content"] = content
        elif isinstance(before, str) and isinstance(content, str):
            last["content"] = f"{before}\n\n{content}"
        else:
            last["content"] = _as_parts(before) + _as_parts(content)
    if isinstance(piece.get("tool_calls"), list):
        last["tool_calls"] = [*_list(last.get("tool_calls")), *_list(piece["tool_calls"])]
    reasoning, thought = piece.get("reasoning_content"), last.get("reasoning_content")
    if reasoning:
        last["reasoning_content"] = f"{thought}\n{reasoning}" if thought else reasoning


def _as_parts(content: object) -> list[object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return _list(content)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _functions_of_responses(tools: object) -> list[Message]:
    found: list[Message] = []
    for tool, _ in objects(tools, "tools") if tools else ():
        parameters, description = tool.get("parameters"), tool.get("description")
        if tool.get("type") == "custom":
            parameters, description = custom_parameters(), _custom_description(tool)
        elif tool.get("type") != "function":
            continue
        strict = tool.get("strict", False)
        function = {"name": tool.get("name"), "description": description, "parameters": parameters}
        found.append({"function": {**function, "strict": strict}})
    return found


def _custom_description(tool: Mapping[str, object]) -> str | None:
    parts = [str(tool["description"])] if tool.get("description") else []
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        syntax, definition = form.get("syntax") or "lark", form.get("definition") or ""
        parts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(parts) or None


# --- Anthropic's Messages


def _of_messages(fields: PromptFields, traits: TemplateTraits, pieces: Pieces) -> list[Message]:
    merges_system = not traits.keeps_inline_system
    items = [*objects(fields.messages, "messages")]
    system: list[str] = []
    if isinstance(fields.system, str):
        system += [fields.system] if fields.system.strip() else []
    else:
        system += _texts(fields.system)
    if merges_system:
        inline = [message.get("content") for message, _ in items if message.get("role") == "system"]
        system += [text for content in inline if (text := _trimmed(content))]
    messages: list[Message] = [{"role": "system", "content": "\n".join(system)}] if system else []

    def read(message: Mapping[str, object], path: str) -> list[Message]:
        role, content = message.get("role"), message.get("content")
        if role == "system" and merges_system:
            return []
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        return _of_blocks(role, content, f"{path}.content")

    return [*messages, *chain.from_iterable(pieces.known(items, read))]


def _trimmed(content: object) -> str:
    if isinstance(content, str):
        return content.strip()
    return "\n".join(filter(None, (text.strip() for text in _texts(content))))


def _of_blocks(role: object, content: object, path: str) -> list[Message]:
    """Return the chat messages of one message in blocks, in the order of its blocks."""
    out: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    for block, at in objects(content, path) if content else ():
        kind = block.get("type")
        if kind == "text":
            parts.append({"type": "text", "text": text_of(block.get("text"), f"{at}.text")})
        elif kind == "image":
            parts.append({"type": "image_url", "source": block.get("source")})
        elif kind in ("thinking", "redacted_thinking", "search_result"):
            raise wrong(f"{at}.type", f"{kind} becomes what the engine's parser alone knows")
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name") or "", "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results = _result_contents(block.get("content"), at)
            if role == "user":
                out.extend([_message(role, parts)] if parts else [])
                parts = []
                name = block.get("tool_use_id") or block.get("id") or ""
                out.extend({"role": "tool", "tool_call_id": name, "content": result} for result in results)
            else:
                text = "\n".join(result for result in results if isinstance(result, str))
                parts.append({"type": "text", "text": f"Tool result: {text}"})
    message = _message(role, parts) if parts else {"role": role}
    if calls:
        message["tool_calls"] = calls
    if not parts and not calls:
        if role == "user":
            return out
        message["content"] = ""
    return [*out, message]


def _message(role: object, parts: list[Message]) -> Message:
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": role, "content": parts[0]["text"] if is_text else parts}


def _result_contents(content: object, path: str) -> list[object]:
    if not isinstance(content, list):
        return [str(content) if content else ""]
    groups: list[list[Message]] = []
    for part, at in objects(content, path) if content else ():
        if part.get("type") == "text":
            if not part.get("text"):
                continue
            known: Message = {"type": "text", "text": part["text"]}
        elif part.get("type") == "image":
            known = {"type": "image_url", "source": part.get("source")}
        elif part.get("type") == "tool_reference":
            known = {"type": "tool_reference", "name": part.get("tool_name") or part.get("name")}
        else:
            raise wrong(f"{at}.type", "becomes what the engine alone knows")
        is_reference = known["type"] == "tool_reference"
        if not groups or (groups[-1][0]["type"] == "tool_reference") != is_reference:
            groups.append([])
        groups[-1].append(known)
    contents: list[object] = []
    for group in groups:
        is_text = len(group) == 1 and group[0]["type"] == "text"
        contents.append(group[0]["text"] if is_text else group)
    return contents or [""]


def _functions_of_messages(tools: object) -> list[Message]:
    return [
        {
            "defer_loading": tool.get("defer_loading"),
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": typed_schema(tool.get("input_schema")),
                "strict": tool.get("strict", False),
            },
        }
        for tool, _ in (objects(tools, "tools") if tools else ())
        if "input_schema" in tool
    ]
