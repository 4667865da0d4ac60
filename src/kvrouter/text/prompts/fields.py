"""What a prompt is made from, and what a template is given of it."""

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
    """The fields of a call that its prompt is made from, of whatever types the client gave them."""

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
    """What a template is given.

    ``names`` are further names for it, such as ``enable_thinking``. With ``continues`` the answer goes on
    with the last message; with a ``continuation`` it begins with that text. With ``has_media`` some texts
    stand for what is none. It ``is_whole`` unless something follows that is not known here. Where
    ``flat_tools`` a template that fails is tried once more with bare functions as tools.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None = None
    names: Mapping[str, object] = {}
    add_generation_prompt: bool = True
    continues: bool = False
    continuation: str = ""
    has_media: bool = False
    is_whole: bool = True
    flat_tools: bool = False


class Chat(NamedTuple):
    """A call of any route as a chat, before an engine's own reading of contents and roles; ``names`` are
    further names for its template.
    """

    messages: Any
    tools: Any
    names: dict[str, object]
    tool_choice: object = None
    add_generation_prompt: bool = True
    continues: bool = False


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What engines find out about a model's template before they give it anything.

    ``loops_over_content``: it takes contents as lists of parts, by vLLM's rule, ``takes_parts`` by SGLang's.
    ``keeps_inline_system``: it renders a system message that is not the first one;
    ``raises_on_inline_system`` when it refuses that.
    ``thinks_without_effort``: the effort ``none`` changes nothing, or is refused.
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
    """The arguments of a chat's tool calls: JSON in strings, of which a body's bounds know nothing."""

    def __init__(self) -> None:
        self._values_left = ARGUMENT_VALUES_MAX

    def decoded(self, text: str, path: str) -> object:
        """Return what a string holds; InvalidRequest when it is no JSON, or holds too much."""
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
        """Return arguments as an object: an empty one where they are none, as engines take old mistakes of a
        model in a history. Raises InvalidRequest for more than the bounds allow.
        """
        if isinstance(arguments, str):
            try:
                arguments = self.decoded(arguments, path)
            except InvalidRequest as error:
                if error.__cause__ is None:  # it is over the bounds, whatever it says
                    raise
                return {}
        return arguments if isinstance(arguments, Mapping) else {}


def wrong(path: str, what: str) -> InvalidRequest:
    """Return the error of a field."""
    return InvalidRequest(f"{path}: {what}", param=path)


def media_text(part: object) -> str:
    """Return a name that stands for a part that is no text: nobody here knows what tokens an engine makes of
    it. Equal parts have one name. Takes about a millisecond for a megabyte.
    """
    written = msgspec.json.encode(part, order="deterministic")
    return f"<media {hashlib.sha256(written).hexdigest()}>"


def objects(items: object, path: str) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield the objects of a list, and the path of each. Raises InvalidRequest."""
    if not isinstance(items, list) or not items:
        raise wrong(path, "must be a list that is not empty")
    if len(items) > MESSAGES_MAX:
        raise wrong(path, f"at most {MESSAGES_MAX} of them, not {len(items)}")
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise wrong(f"{path}[{at}]", "must be an object")
        yield item, f"{path}[{at}]"


class Pieces:
    """What the items of a call become, up to the first that is not known here; ``is_whole`` without one."""

    def __init__(self) -> None:
        self.is_whole = True

    def known(
        self,
        items: Iterable[tuple[Mapping[str, object], str]],
        read: Callable[[Mapping[str, object], str], Read],
    ) -> Iterator[Read]:
        """Yield what is read of each item. Raises InvalidRequest where the first one is not known."""
        for at, (item, path) in enumerate(items):
            try:
                piece = read(item, path)
            except InvalidRequest:
                if not at:
                    raise
                self.is_whole = False
                return
            yield piece


def text_of(value: object, path: str) -> str:
    """Return a string. Raises InvalidRequest for anything else."""
    if not isinstance(value, str):
        raise wrong(path, "must be a string")
    return value


def ordered(value: Mapping[str, object], names: Sequence[str]) -> Message:
    """Return ``value`` with these fields first, in this order, as a request model writes it."""
    first = {name: value[name] for name in names if name in value}
    return first | {name: field for name, field in value.items() if name not in first}


def template_names(kwargs: object) -> dict[str, object]:
    """Return a copy of a call's own names for the template. Raises InvalidRequest."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise wrong("chat_template_kwargs", "must be an object")
    return dict(kwargs)
