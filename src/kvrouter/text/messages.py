"""Chat messages as a client sends them, checked and put into the form that chat templates read."""

import hashlib
from collections.abc import Mapping, Sequence
from operator import is_

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.json_bounds import BLANKS_IN_ROW_MAX, BLANKS_MAX, JsonBounds, JsonRefused

MESSAGES_MAX = 4_096
ARGUMENT_VALUES_MAX = 65_536
DEPTH_MAX = 64
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_BOUNDS = JsonBounds(
    depth=DEPTH_MAX,
    values=ARGUMENT_VALUES_MAX,
    items=ARGUMENT_VALUES_MAX,
    numbers=0,
    text_bytes=2**63,
    short_bytes=0,
    key_bytes=4_096,
    number_bytes=512,
    blanks_in_row=BLANKS_IN_ROW_MAX,
    blanks=BLANKS_MAX,
    number_fields=(),
    short_fields=(),
)


def template_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a copy of ``messages`` that every chat template understands.

    Content becomes one string (the text parts, a newline between them; empty for an assistant that only calls
    tools), the arguments of tool calls become objects, fields that are not known here stay as they are.
    Raises ``InvalidRequest`` whose ``param`` is the path of the field, such as ``messages[2].content``.
    """
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise InvalidRequest(
            f"messages: at most {MESSAGES_MAX} messages, not {len(messages)}", param="messages"
        )
    arguments = _Arguments()
    return [_template_message(message, f"messages[{at}]", arguments) for at, message in enumerate(messages)]


def media_named(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Return ``messages`` with a name in the place of each part that is no text: nobody here knows what
    tokens an engine makes of it. Equal parts have one name. The very same object when there is none.

    Takes about a millisecond for a megabyte of pictures.
    """
    named = [_media_named(message) for message in messages]
    return messages if all(map(is_, named, messages)) else named


def _media_named(message: Mapping[str, object]) -> Mapping[str, object]:
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence) or all(map(_is_text, content)):
        return message
    return {**message, "content": [part if _is_text(part) else _name_of(part) for part in content]}


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _name_of(part: object) -> Mapping[str, object]:
    written = msgspec.json.encode(part, order="deterministic")
    return {"type": "text", "text": f"<media {hashlib.sha256(written).hexdigest()}>"}


def text_chars(messages: Sequence[object]) -> int:
    """Return how many characters of text stand in ``messages``, well formed or not, names of fields included.

    It tells, before anything is rendered, how long that will take.
    """
    chars = 0
    left: list[object] = [messages]
    while left:
        value = left.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, Mapping):
            left.extend(value.keys())
            left.extend(value.values())
        elif isinstance(value, Sequence):
            left.extend(value)
    return chars


class _Arguments:
    """The arguments of a chat's tool calls: JSON in strings, of which a body's bounds know nothing."""

    def __init__(self) -> None:
        self._values_left = ARGUMENT_VALUES_MAX

    def decoded(self, text: str, path: str) -> object:
        """Return the object that a string holds; InvalidRequest when it is none, or holds too much."""
        data = (text or "{}").encode("utf-8", "surrogatepass")
        try:
            _, values = _BOUNDS.scan(data)
            self._values_left -= values
            if self._values_left >= 0:
                return msgspec.json.decode(data)
        except JsonRefused as error:
            if error.kind in ("syntax", "not_finite"):
                raise _wrong(path, "must be a JSON object in a string") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _wrong(path, "must be a JSON object in a string") from error
        raise _wrong(path, f"all together at most {ARGUMENT_VALUES_MAX} values, {DEPTH_MAX} levels deep")


def _template_message(message: object, path: str, arguments: _Arguments) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise _wrong(path, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    out = dict(message)
    calls = message.get("tool_calls")
    if calls is None:
        out.pop("tool_calls", None)
    else:
        out["tool_calls"] = _template_calls(calls, f"{path}.tool_calls", arguments)
    content = message.get("content")
    if content is None and role == "assistant":
        out["content"] = ""
    else:
        out["content"] = _content_text(content, f"{path}.content")
    return out


def _content_text(content: object, path: str) -> str:
    """Return the text of a content: a string, or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(path, "must be a string or a list of parts")
    return "\n".join(_part_text(part, f"{path}[{at}]") for at, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(path, "must be an object with a type")
    if part.get("type") != "text":
        raise _wrong(
            f"{path}.type", "only text parts are supported; this model takes no image, audio or file"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{path}.text", "must be a string")
    return text


def _template_calls(calls: object, path: str, arguments: _Arguments) -> list[dict[str, object]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(path, "must be a list of tool calls")
    return [_template_call(call, f"{path}[{at}]", arguments) for at, call in enumerate(calls)]


def _template_call(call: object, path: str, all_arguments: _Arguments) -> dict[str, object]:
    """Return a tool call whose arguments are an object: templates print them as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(f"{path}.function", "must be an object with a name and arguments")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{path}.function.name", "must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = all_arguments.decoded(arguments, f"{path}.function.arguments")
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{path}.function.arguments", "must be a JSON object in a string")
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {what}", param=path)
