"""The fields of a call that its prompt is made from, and the prompt as a template gets it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.json import Unreadable, attempted
from kvrouter.core.json_bounds import BLANKS_IN_ROW_MAX, BLANKS_MAX, JsonBounds, JsonRefused
from kvrouter.core.requests import CallRoute

Message = dict[str, object]
Read = TypeVar("Read")

MESSAGES_MAX = 4_096
ARGUMENT_VALUES_MAX = 65_536
DEPTH_MAX = 64


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a call that its prompt is made from, with unchecked types."""

    route: CallRoute = CallRoute.CHAT
    messages: object = None
    tools: object = None
    tool_choice: object = None
    chat_template_kwargs: object = None
    documents: object = None
    add_generation_prompt: object = None
    continue_final_message: object = None
    reasoning_effort: object = None
    reasoning: object = None
    instructions: object = None
    input: object = None
    system: object = None
    thinking: object = None
    output_config: object = None


class Prompt(NamedTuple):
    """A prompt as a template gets it.

    ``names`` are further variables, such as ``enable_thinking``. With ``continues`` the answer continues the
    last message; with a ``continuation`` it begins with that text. With ``has_media`` some texts are
    placeholders for media. ``is_complete`` is False if unknown parts follow. With ``flat_tools`` a failing
    template is rendered again with bare functions as tools.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None = None
    names: Mapping[str, object] = {}
    add_generation_prompt: bool = True
    continues: bool = False
    continuation: str = ""
    has_media: bool = False
    is_complete: bool = True
    flat_tools: bool = False


class Chat(NamedTuple):
    """A call of any route as a chat, before an engine's conversion of contents and roles; ``names`` are
    further variables of its template.
    """

    messages: Any
    tools: Any
    names: dict[str, object]
    tool_choice: object = None
    add_generation_prompt: bool = True
    continues: bool = False


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a template that engines detect at start.

    ``loops_over_content``: it takes contents as lists of parts, by vLLM's rule; ``takes_parts``: by SGLang's.
    ``names_developer``: it names the role ``developer``. ``keeps_inline_system``: it renders a system message
    that is not the first one; ``raises_on_inline_system``: it refuses that. ``thinks_without_effort``: the
    effort ``none`` has no effect, or is refused.
    """

    loops_over_content: bool = False
    takes_parts: bool = False
    names_developer: bool = False
    keeps_inline_system: bool = True
    raises_on_inline_system: bool = False
    thinks_without_effort: bool = False


PLAIN_TEMPLATE = TemplateTraits()

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


class Arguments:
    """Decodes the arguments of a chat's tool calls: JSON in strings, which a body's bounds do not cover."""

    def __init__(self) -> None:
        self._values_left = ARGUMENT_VALUES_MAX

    def decoded(self, text: str, path: str) -> object:
        """Return decoded arguments; raise InvalidRequest for invalid JSON, or over the bounds."""
        data = (text or "{}").encode("utf-8", "surrogatepass")
        try:
            _, values = _BOUNDS.scan(data)
            self._values_left -= values
            if self._values_left >= 0:
                return attempted(msgspec.json.decode, data)
        except JsonRefused as error:
            if error.kind in ("syntax", "not_finite"):
                raise wrong(path, "must be a JSON object in a string") from error
        except Unreadable as error:
            raise wrong(path, "must be a JSON object in a string") from error
        raise wrong(path, f"all together at most {ARGUMENT_VALUES_MAX} values, {DEPTH_MAX} levels deep")

    def coerced(self, arguments: object, path: str) -> Mapping[str, object]:
        """Return arguments as an object, empty for invalid ones, as engines do with a model's mistakes in a
        history. Raises InvalidRequest over the bounds.
        """
        if isinstance(arguments, str):
            try:
                arguments = self.decoded(arguments, path)
            except InvalidRequest as error:
                if error.__cause__ is None:  # it is over the bounds
                    raise
                return {}
        return arguments if isinstance(arguments, Mapping) else {}


def wrong(path: str, problem: str) -> InvalidRequest:
    """Return the InvalidRequest of a field."""
    return InvalidRequest(f"{path}: {problem}", param=path)


def media_text(part: object) -> str:
    """Return a placeholder for a part that is not text, whose tokens the router does not know. Equal parts
    have equal placeholders. Takes about a millisecond per megabyte.
    """
    written = msgspec.json.encode(part, order="deterministic")
    return f"<media {hashlib.sha256(written).hexdigest()}>"


def objects(items: object, path: str) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield the objects of a list with their paths. Raises InvalidRequest for an empty or invalid list."""
    if not isinstance(items, list) or not items:
        raise wrong(path, "must be a list that is not empty")
    if len(items) > MESSAGES_MAX:
        raise wrong(path, f"at most {MESSAGES_MAX} of them, not {len(items)}")
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise wrong(f"{path}[{at}]", "must be an object")
        yield item, f"{path}[{at}]"


class Pieces:
    """Converts the items of a call up to the first unknown one, which clears ``is_complete``."""

    def __init__(self) -> None:
        self.is_complete = True

    def known(
        self,
        items: Iterable[tuple[Mapping[str, object], str]],
        read: Callable[[Mapping[str, object], str], Read],
    ) -> Iterator[Read]:
        """Yield each converted item. Raises InvalidRequest if the first one is unknown."""
        for at, (item, path) in enumerate(items):
            try:
                piece = read(item, path)
            except InvalidRequest:
                if not at:
                    raise
                self.is_complete = False
                return
            yield piece


def text_of(value: object, path: str) -> str:
    """Return a string. Raises InvalidRequest for anything else."""
    if not isinstance(value, str):
        raise wrong(path, "must be a string")
    return value


def ordered(value: Mapping[str, object], names: Sequence[str]) -> Message:
    """Return ``value`` with these fields first, in the order of a request model."""
    first = {name: value[name] for name in names if name in value}
    return first | {name: field for name, field in value.items() if name not in first}


def template_names(kwargs: object) -> dict[str, object]:
    """Return a copy of a call's ``chat_template_kwargs``. Raises InvalidRequest."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise wrong("chat_template_kwargs", "must be an object")
    return dict(kwargs)
