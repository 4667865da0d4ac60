"""Chats: checked messages, and a model's chat template.

Templates come from the model's folder and run sandboxed. They get the names of Hugging Face's renderer:
``messages``, ``tools``, ``add_generation_prompt``, the special tokens, ``raise_exception``, ``strftime_now``,
``tojson``, loop controls and ``generation`` blocks. Folders are not trusted, so a rendering has bounds of
time and memory (:mod:`kvrouter.text.template_sandbox`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.text.prompts.fields import MESSAGES_MAX, Arguments, Prompt, TemplateTraits, wrong
from kvrouter.text.prompts.traits import traits_of
from kvrouter.text.template_budget import CPU_S_MAX, CPU_S_MAX_ON_LOOP, Budget, Charging, TemplateOverBounds
from kvrouter.text.template_sandbox import BoundedEnvironment, Limited
from kvrouter.text.tokenizer import read_json_object, token_content

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a copy of ``messages`` in the form that every chat template takes.

    Content becomes one string (the text parts, joined by newlines; empty for an assistant that only calls
    tools), the arguments of tool calls become objects, unknown fields stay unchanged. Raises
    ``InvalidRequest`` with the path of the field as ``param``, such as ``messages[2].content``.
    """
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise InvalidRequest(
            f"messages: at most {MESSAGES_MAX} messages, not {len(messages)}", param="messages"
        )
    arguments = Arguments()
    return [_template_message(message, f"messages[{at}]", arguments) for at, message in enumerate(messages)]


_MAPPINGS = (dict, Mapping)
"""``dict`` comes first, as an abstract class takes longer to check."""


def text_chars(messages: Sequence[object]) -> int:
    """Return the number of characters in ``messages``, well formed or not, including names of fields.

    It estimates the time of a rendering beforehand.
    """
    chars = 0
    left: list[object] = [messages]
    while left:
        value = left.pop()
        if isinstance(value, list):  # before the abstract classes
            left += value
        elif isinstance(value, str):
            chars += len(value)
        elif isinstance(value, _MAPPINGS):
            left += value
            left += value.values()
        elif isinstance(value, Sequence):
            left.extend(value)
    return chars


def _template_message(message: object, path: str, arguments: Arguments) -> dict[str, object]:
    if not isinstance(message, _MAPPINGS):
        raise wrong(path, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{path}.role", f"must be one of {', '.join(ROLES)}")
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
    """Return the text of a message's content: a string, or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise wrong(path, "must be a string or a list of parts")
    return "\n".join(_part_text(part, f"{path}[{at}]") for at, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, Mapping):
        raise wrong(path, "must be an object with a type")
    if part.get("type") != "text":
        raise wrong(f"{path}.type", "only text parts are supported; this model takes no image, audio or file")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong(f"{path}.text", "must be a string")
    return text


def _template_calls(calls: object, path: str, arguments: Arguments) -> list[dict[str, object]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise wrong(path, "must be a list of tool calls")
    return [_template_call(call, f"{path}[{at}]", arguments) for at, call in enumerate(calls)]


def _template_call(call: object, path: str, all_arguments: Arguments) -> dict[str, object]:
    """Return a tool call with its arguments as an object, which templates print as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise wrong(f"{path}.function", "must be an object with a name and arguments")
    if not isinstance(function.get("name"), str):
        raise wrong(f"{path}.function.name", "must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = all_arguments.decoded(arguments, f"{path}.function.arguments")
    if not isinstance(arguments, Mapping):
        raise wrong(f"{path}.function.arguments", "must be a JSON object in a string")
    return {**call, "function": {**function, "arguments": arguments}}


RANGE_STEPS_MAX = 100_000
"""The most steps of all ``range`` calls of one rendering."""

RENDERED_CHARS_MAX = 16_000_000

SOURCE_CHARS_MAX = 256 * 1024
"""The longest template; real models' templates have up to about 20,000 characters."""

ERROR_CHARS_MAX = 500
"""The most characters of a template's error that ours repeats."""

TIME_PATTERN_CHARS_MAX = 100

RESERVED_NAMES = frozenset({"messages", "range", "raise_exception", "strftime_now"})

CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a last message that the answer continues, as transformers does."""


class TemplateFailed(InvalidRequest):
    """A chat template failed on messages, without refusing them by ``raise_exception``."""


class _TemplateRefusal(TemplateError):
    """A template called ``raise_exception``."""


# Exceptions of a template on unexpected messages: its refusals and Python's errors.
TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def local_time(pattern: str) -> str:
    """Return the local date and time formatted by ``pattern``, a ``strftime`` format."""
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One model's compiled template. Thread-safe."""

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
        """Compile ``source``; ``tool_source`` is for requests with tools. ``name`` is used in errors.

        Raises ``ConfigError`` when it does not compile, or exceeds its bounds on a test message.
        """
        self._name = name
        self._template = _compile(source, strftime_now)
        self._tool_template = self._template if tool_source is None else _compile(tool_source, strftime_now)
        self._special_tokens = dict(special_tokens or {})
        self._rendered_chars_max = rendered_chars_max
        self.fault = self._probe()
        """Why the template fails on a test message; None if it renders or refuses it."""
        self.traits: TemplateTraits = traits_of(source, self._template.environment.parse(source), self._tried)

    @classmethod
    def from_folder(
        cls, folder: Path, *, strftime_now: Callable[[str], str] = local_time
    ) -> "ChatTemplate | None":
        """Read a folder's template from the files that engines read; None without one."""
        config = read_json_object(folder / "tokenizer_config.json")
        sources = _sources_of(folder, config.get("chat_template"))
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

    def render(self, messages: Sequence[Mapping[str, object]], *, cpu_s_max: float = CPU_S_MAX) -> str:
        """Return the prompt text of messages, rendered within ``cpu_s_max`` seconds of processor time.

        Raises ``InvalidRequest`` naming the malformed field in ``messages``, and as :meth:`render_prompt`
        does.
        """
        return self.render_prompt(Prompt(template_messages(messages)), cpu_s_max=cpu_s_max)

    def render_prompt(self, prompt: Prompt, *, cpu_s_max: float = CPU_S_MAX) -> str:
        """Return the text of a prompt, rendered within ``cpu_s_max`` seconds of processor time.

        Raises ``InvalidRequest`` naming ``messages`` when the template refuses them, ``TemplateFailed`` when
        it fails on them, ``InvalidRequest`` naming ``chat_template_kwargs`` for a reserved name in that, and
        ``TemplateOverBounds`` when the template takes too much time or memory.
        """
        if taken := sorted(RESERVED_NAMES & prompt.names.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: {taken[0]} is set by the router", param="chat_template_kwargs"
            )
        messages = _marked(prompt.messages) if prompt.continues else prompt.messages
        names = self._special_tokens | {"documents": None} | dict(prompt.names)
        names.update(messages=messages, add_generation_prompt=prompt.add_generation_prompt)
        with_budget = (prompt.messages, prompt.tools, prompt.names)
        try:
            with Charging(Budget(with_budget, cpu_s_max=cpu_s_max)):
                text = self._text_with_tools(names, prompt)
        except TemplateOverBounds as error:
            raise self._over_bounds(error.message) from error
        except (RecursionError, MemoryError) as error:
            why = (
                "it calls itself too often"
                if isinstance(error, RecursionError)
                else "there is no memory left"
            )
            raise self._over_bounds(why) from error
        except _TemplateRefusal as error:
            message = str(error)[:ERROR_CHARS_MAX]
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {message}", param="messages"
            ) from error
        except TEMPLATE_FAULTS as error:
            message = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
            raise TemplateFailed(
                f"messages: the model's chat template fails: {message}", param="messages"
            ) from error
        return _until_mark(text) if prompt.continues else text + prompt.continuation

    def _text_with_tools(self, names: dict[str, object], prompt: Prompt) -> str:
        tools = prompt.tools or None
        names.update(tools=tools, range=RangeBudget(RANGE_STEPS_MAX))
        template = self._tool_template if tools else self._template
        try:
            return self._bounded_text(template, names)
        except TEMPLATE_FAULTS:
            if tools is None or not prompt.flat_tools:
                raise
            flat = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
            return self._bounded_text(template, names | {"tools": flat})

    def _tried(self, prompt: Prompt) -> str | None:
        try:
            return self.render_prompt(prompt, cpu_s_max=CPU_S_MAX_ON_LOOP)
        except (InvalidRequest, TemplateOverBounds):
            return None

    def _over_bounds(self, why: str) -> TemplateOverBounds:
        return TemplateOverBounds(f"the chat template of {self._name} goes over its bounds: {why}")

    def _probe(self) -> str | None:
        """Return why the template fails on a test message; None if it renders or refuses it. Raises
        ConfigError when it exceeds its bounds.
        """
        try:
            self.render([{"role": "user", "content": "a"}])
        except TemplateFailed as error:
            return error.message.removeprefix("messages: ")
        except InvalidRequest:
            return None
        except TemplateOverBounds as error:
            raise ConfigError(error.message, param="chat_template") from error
        return None

    def _bounded_text(self, template: Template, names: Mapping[str, object]) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in template.root_render_func(template.new_context(dict(names))):
            chars += len(piece)
            if chars > self._rendered_chars_max:
                raise ValueError(f"the text would be longer than {self._rendered_chars_max} characters")
            pieces.append(piece)
        return "".join(pieces)


def _marked(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Return the messages with a mark at the end of the last one's text."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        part = content[-1]
        last["content"] = [*content[:-1], {**part, "text": f"{part['text']}{CONTINUE_MARK}"}]
    elif isinstance(content, str):
        last["content"] = content + CONTINUE_MARK
    else:
        raise InvalidRequest("messages: the last one has no text to go on with", param="messages")
    return [*messages[:-1], last]


def _until_mark(text: str) -> str:
    """Return the text up to the mark, without trailing blanks if the template stripped those of the mark."""
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0:
        raise InvalidRequest("messages: the chat template leaves the last one out", param="messages")
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()


class RangeBudget(Limited):
    """The ``range`` function of one rendering: all its calls share one budget of steps."""

    def __init__(self, steps_max: int) -> None:
        self._steps_left = steps_max

    def __call__(self, *bounds: int) -> range:
        """Return ``range(*bounds)``; raise ``TemplateOverBounds`` over the budget."""
        steps = range(*bounds)
        try:
            self._steps_left -= len(steps)
        except OverflowError:
            self._steps_left = -1
        if self._steps_left < 0:
            raise TemplateOverBounds(f"it takes more than {RANGE_STEPS_MAX} steps of range")
        return steps


class GenerationBlock(Extension):
    """The tag ``{% generation %}``, which marks the assistant's tokens for training; renders its content."""

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
        template = environment.from_string(source)
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ConfigError(
            "the chat template does not compile: it is nested too deeply", param="chat_template"
        ) from error
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not compile, line {error.lineno}: {error.message}", param="chat_template"
        ) from error
    template.globals = dict(template.globals)  # a plain dict: each rendering copies it
    return template


_WIDE_TIME = re.compile(r"%[^a-zA-Z]*[0-9]")


def _sources_of(folder: Path, entry: object) -> dict[str, str]:
    """Return the templates of a folder by name: its files, else ``entry``. Engines use
    ``chat_template.json``, the template of a model with images, for calls without tools.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {each.stem: each.read_text(encoding="utf-8") for each in more} | {
            "default": path.read_text(encoding="utf-8")
        }
    sources = _named_sources(entry)
    of_processor = read_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(of_processor, str):
        with_tools = sources.get("tool_use", sources.get("default", of_processor))
        sources = {"default": of_processor, "tool_use": with_tools}
    return sources


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
    """Return plain JSON; jinja2's filter would escape HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)
