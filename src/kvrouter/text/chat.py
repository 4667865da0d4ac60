"""Chat: checked messages, and a model's chat template.

Templates come from the model's folder and run sandboxed. They see what Hugging Face's own renderer shows:
``messages``, ``tools``, ``add_generation_prompt``, the special tokens, ``raise_exception``, ``strftime_now``,
``tojson``, loop controls and ``generation`` blocks. A folder may be anybody's, so a rendering has bounds of
time and memory (:mod:`kvrouter.text.template_sandbox`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from operator import is_
from pathlib import Path

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.json_bounds import BLANKS_IN_ROW_MAX, BLANKS_MAX, JsonBounds, JsonRefused
from kvrouter.text.template_budget import CPU_S_MAX, Budget, Spending, TemplateOverBounds
from kvrouter.text.template_sandbox import BoundedEnvironment, Spender
from kvrouter.text.tokenizer import read_json_object, token_content

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

    Takes about a millisecond for a megabyte of images.
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

    It indicates, before anything is rendered, how long that will take.
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


RANGE_STEPS_MAX = 100_000
"""What all ``range`` calls of one rendering may add up to."""

RENDERED_CHARS_MAX = 16_000_000

SOURCE_CHARS_MAX = 256 * 1024
"""The longest template; those of real models have up to about 20,000 characters."""

ERROR_CHARS_MAX = 500
"""How much of a template's own words an error repeats."""

TIME_PATTERN_CHARS_MAX = 100

RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "range", "raise_exception", "strftime_now"}
)

# What a template can raise when messages are not as it expects: its own refusals and Python's.
TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def local_time(pattern: str) -> str:
    """Return the local date and time in ``pattern``, as ``strftime`` reads it."""
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One model's template, compiled. Safe to use from several threads at once."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        strftime_now: Callable[[str], str] = local_time,
        rendered_chars_max: int = RENDERED_CHARS_MAX,
        name: str = "the model",
    ) -> None:
        """Compile ``source``; ``tool_source`` serves requests with tools. ``name`` stands in errors.

        ``ConfigError`` for one that does not compile, or that goes over its bounds on a first message.
        """
        self._name = name
        self._template = _compile(source, strftime_now)
        self._tool_template = self._template if tool_source is None else _compile(tool_source, strftime_now)
        self._special_tokens = dict(special_tokens or {})
        self._rendered_chars_max = rendered_chars_max
        self._probe()

    @classmethod
    def from_folder(
        cls, folder: Path, *, strftime_now: Callable[[str], str] = local_time
    ) -> "ChatTemplate | None":
        """Read ``chat_template.jinja``, else what ``tokenizer_config.json`` has; None when that is none."""
        config = read_json_object(folder / "tokenizer_config.json")
        path = folder / "chat_template.jinja"
        entry = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        sources = _named_sources(entry)
        if "default" not in sources:
            return None
        tokens = {key: token_content(entry) for key, entry in config.items() if key.endswith("_token")}
        return cls(
            sources["default"],
            tool_source=sources.get("tool_use"),
            special_tokens={key: token for key, token in tokens.items() if token is not None},
            strftime_now=strftime_now,
            name=str(folder),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        cpu_s_max: float = CPU_S_MAX,
    ) -> str:
        """Return the prompt text of ``messages``, made within so much processor time.

        ``template_kwargs`` are further names for the template, such as ``enable_thinking``. Raises
        ``InvalidRequest`` naming ``messages``, or a field in them, when they are malformed or refused by the
        template, and naming ``chat_template_kwargs`` when that takes a reserved name. Raises
        ``TemplateOverBounds`` when the template takes too long or makes too much.
        """
        names = dict(template_kwargs or {})
        if taken := sorted(RESERVED_NAMES & names.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: {taken[0]} is set by the router", param="chat_template_kwargs"
            )
        names = self._special_tokens | names
        names.update(
            messages=template_messages(messages),
            tools=tools or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            range=RangeBudget(RANGE_STEPS_MAX),
        )
        try:
            with Spending(Budget((messages, tools, template_kwargs), cpu_s_max=cpu_s_max)):
                return self._bounded_text(self._tool_template if tools else self._template, names)
        except TemplateOverBounds as error:
            raise self._over_bounds(error.message) from error
        except (RecursionError, MemoryError) as error:
            why = (
                "it calls itself too often"
                if isinstance(error, RecursionError)
                else "there is no memory left"
            )
            raise self._over_bounds(why) from error
        except TEMPLATE_FAULTS as error:
            message = str(error)[:ERROR_CHARS_MAX]
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {message}", param="messages"
            ) from error

    def _over_bounds(self, why: str) -> TemplateOverBounds:
        return TemplateOverBounds(f"the chat template of {self._name} goes over its bounds: {why}")

    def _probe(self) -> None:
        """See that the template renders one message, or refuses it. Raises ConfigError."""
        try:
            self.render([{"role": "user", "content": "a"}])
        except InvalidRequest:
            return
        except TemplateOverBounds as error:
            raise ConfigError(error.message, param="chat_template") from error

    def _bounded_text(self, template: Template, names: Mapping[str, object]) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in template.generate(names):
            chars += len(piece)
            if chars > self._rendered_chars_max:
                raise ValueError(f"the text would be longer than {self._rendered_chars_max} characters")
            pieces.append(piece)
        return "".join(pieces)


class RangeBudget(Spender):
    """The ``range`` of one rendering: nested loops share one number of steps."""

    def __init__(self, steps_max: int) -> None:
        self._steps_left = steps_max

    def __call__(self, *bounds: int) -> range:
        """Return ``range(*bounds)``; ``TemplateOverBounds`` when the budget does not cover it."""
        steps = range(*bounds)
        try:
            self._steps_left -= len(steps)
        except OverflowError:
            self._steps_left = -1
        if self._steps_left < 0:
            raise TemplateOverBounds(f"it takes more than {RANGE_STEPS_MAX} steps of range")
        return steps


class GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's own tokens for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, strftime_now: Callable[[str], str]) -> Template:
    if len(source) > SOURCE_CHARS_MAX:
        raise ConfigError(
            f"the chat template has {len(source)} characters: at most {SOURCE_CHARS_MAX}",
            param="chat_template",
        )

    def bounded_time(pattern: str) -> str:
        if len(pattern) > TIME_PATTERN_CHARS_MAX or _WIDE_TIME.search(pattern):
            raise TemplateOverBounds("it writes the time to a width that is not bounded")
        return strftime_now(pattern)

    environment = BoundedEnvironment(extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = bounded_time
    environment.allow(_raise_exception, bounded_time)
    environment.bound_filters()
    try:
        return environment.from_string(source)
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ConfigError(
            "the chat template does not compile: it is nested too deeply", param="chat_template"
        ) from error
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not compile, line {error.lineno}: {error.message}", param="chat_template"
        ) from error


_WIDE_TIME = re.compile(r"%[^a-zA-Z]*[0-9]")


def _named_sources(entry: object) -> dict[str, str]:
    """Return template sources by name; a lone string is the default one."""
    if isinstance(entry, str):
        return {"default": entry}
    sources: dict[str, str] = {}
    for each in entry if isinstance(entry, list) else []:
        if isinstance(each, dict):
            name, source = each.get("name"), each.get("template")
            if isinstance(name, str) and isinstance(source, str):
                sources[name] = source
    return sources


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
