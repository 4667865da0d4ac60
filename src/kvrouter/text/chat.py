"""A model's chat template: messages to the text that the model was trained on.

Templates come from the model's folder and run sandboxed. They see what Hugging Face's own renderer shows:
``messages``, ``tools``, ``add_generation_prompt``, the special tokens, ``raise_exception``, ``strftime_now``,
``tojson``, loop controls and ``generation`` blocks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.text.folder import read_json_object, token_content
from kvrouter.text.messages import template_messages

RANGE_STEPS_MAX = 100_000
"""What all ``range`` calls of one rendering may add up to."""

RENDERED_CHARS_MAX = 16_000_000

RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "range", "raise_exception", "strftime_now"}
)

# What a template can raise when messages are not as it expects: its own refusals and Python's.
TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
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
    ) -> None:
        """Compile ``source``; ``tool_source`` serves requests with tools. ``ConfigError`` on bad syntax."""
        self._template = _compile(source, strftime_now)
        self._tool_template = self._template if tool_source is None else _compile(tool_source, strftime_now)
        self._special_tokens = dict(special_tokens or {})
        self._rendered_chars_max = rendered_chars_max

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
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of ``messages``.

        ``template_kwargs`` are further names for the template, such as ``enable_thinking``. Raises
        ``InvalidRequest`` naming ``messages``, or a field in them, when they are malformed or refused by the
        template, and naming ``chat_template_kwargs`` when that takes a reserved name.
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
            return self._bounded_text(self._tool_template if tools else self._template, names)
        except TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error

    def _bounded_text(self, template: Template, names: Mapping[str, object]) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in template.generate(names):
            chars += len(piece)
            if chars > self._rendered_chars_max:
                raise ValueError(f"the text would be longer than {self._rendered_chars_max} characters")
            pieces.append(piece)
        return "".join(pieces)


class RangeBudget:
    """The ``range`` of one rendering: nested loops share one number of steps."""

    def __init__(self, steps_max: int) -> None:
        self._steps_left = steps_max

    def __call__(self, *bounds: int) -> range:
        """Return ``range(*bounds)``; ``OverflowError`` when the budget does not cover it."""
        steps = range(*bounds)
        self._steps_left -= len(steps)
        if self._steps_left < 0:
            raise OverflowError(f"more than {RANGE_STEPS_MAX} steps of range")
        return steps


class GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's own tokens for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, strftime_now: Callable[[str], str]) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not compile, line {error.lineno}: {error.message}", param="chat_template"
        ) from error


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


def _to_json(
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
