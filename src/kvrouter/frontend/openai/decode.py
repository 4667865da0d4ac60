"""From a scanned body to typed values, or to an error that names the field.

Each of them changes the answer or where it is computed. Left alone in silence, a client would take text
without its grammar, or a worker outside its constraint, for what it asked for.

They are read after everything else of a call was checked: they are what is long in a body.

Token ids are read natively and stay packed: as Python objects a million of them would hold the interpreter
for a tenth of a second, and ten times the memory.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.json_bounds import JsonRefused, token_ids
from kvrouter.core.requests import TokenBuffer
from kvrouter.frontend.openai.scanned import ScannedBody
from kvrouter.frontend.openai.schema import ChatBody, CompletionBody, GenerateBody, MisplacedFields

Body = TypeVar("Body")

SHOWN_CHARS_MAX = 300
"""What an error quotes of a body is cut here: a client knows what it sent."""

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]+)`")


def decode_body(decoder: "msgspec.json.Decoder[Body]", body: ScannedBody) -> Body:
    """Return what ``body`` means; raise :class:`InvalidRequest` with the field's path as ``param``."""
    try:
        return decoder.decode(body.data)
    except msgspec.ValidationError as error:
        raise named_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(shown(f"the body is not valid JSON: {error}")) from None


def named_error(message: str, *, at: str = "") -> InvalidRequest:
    """Turn msgspec's message, which ends in the path, into one that begins with it, below ``at``."""
    found = _PATH.search(message)
    below = found["path"] if found else ""
    path = f"{at}.{below}" if at and below and not below.startswith("[") else at + below
    what = message[: found.start()] if found else message
    for pattern in (_MISSING, _UNKNOWN):
        named = pattern.search(what)
        if named:
            path = f"{path}.{named['field']}" if path else named["field"]
    what, path = what[:1].lower() + what[1:], shown(path)
    return InvalidRequest(shown(f"{path}: {what}" if path else what), param=path or None)


def shown(text: str) -> str:
    """Return ``text`` short enough for an error, and without halves of surrogate pairs."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return cut.encode("utf-8", "replace").decode()


_HARMLESS: Mapping[str, Sequence[object]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "modalities": ([], ["text"]),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""The values, apart from null, with which a field asks for nothing; ``auto`` without tools chooses none."""

_HARMLESS_IN_CHAT: Mapping[str, Sequence[object]] = {"logprobs": (False,), "top_logprobs": (0,)}
_HARMLESS_IN_COMPLETION: Mapping[str, Sequence[object]] = {"logprobs": ()}
"""A number: at 0 it asks for the log probability of each chosen token."""


def refuse_fields(body: GenerateBody) -> None:
    """Raise :class:`InvalidRequest` naming the first field that cannot be honoured where it is."""
    refuse_misplaced(body)
    _refuse(body, _HARMLESS)
    if isinstance(body, ChatBody):
        _refuse(body, _HARMLESS_IN_CHAT)
    elif isinstance(body, CompletionBody):
        _refuse(body, _HARMLESS_IN_COMPLETION)


def refuse_misplaced(body: MisplacedFields) -> None:
    """Raise :class:`InvalidRequest` naming the first field that belongs into ``nvext``."""
    for field in MisplacedFields.__struct_fields__:
        if getattr(body, field) is not None:
            raise InvalidRequest(
                f"{field}: belongs into nvext, as nvext.{field}; beside it nothing reads it", param=field
            )


def _refuse(body: GenerateBody, harmless: Mapping[str, Sequence[object]]) -> None:
    for field, values in harmless.items():
        value = getattr(body, field)
        if value is None or value in values:
            continue
        if field == "best_of":
            raise InvalidRequest(f"{field}: one answer a request, not {value}", param=field)
        raise InvalidRequest(
            f"{field}: needs an engine that takes text; the workers of this model take tokens", param=field
        )


Content = TypeVar("Content")

_MESSAGES = msgspec.json.Decoder(list[dict[str, object]])
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_LIST = re.compile(rb"\[\s*+(?P<inner>\[\s*+)?+(?P<first>[^\s\[])")
_END = re.compile(rb"\s*+\]")


class Prompt(NamedTuple):
    """The first prompt of a field that may hold several; ``is_only``: it holds no other."""

    content: str | TokenBuffer
    is_only: bool = True


def read_messages(body: ScannedBody) -> list[dict[str, object]]:
    """Return the messages of a body that has them; raise :class:`InvalidRequest` naming what is wrong."""
    begin, end, _, _ = body.fields["messages"]
    messages = _decoded(_MESSAGES, memoryview(body.data)[begin:end], "messages")
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    return messages


def read_prompt(data: bytes, begin: int, end: int, *, at: str) -> Prompt:
    """Return the first prompt of the field ``at``, in any of OpenAI's four forms; ``data`` is JSON from
    ``begin`` to ``end``.

    Raises :class:`InvalidRequest` naming the field, or an element of it.
    """
    written = _LIST.match(data, begin, end)
    if written is None:
        return Prompt(_decoded(_TEXT, memoryview(data)[begin:end], at))
    first = written["first"]
    if written["inner"]:
        content, list_end = read_token_ids(data, written.start("inner"), at=f"{at}[0]")
        return Prompt(content, is_only=_END.match(data, list_end) is not None)
    if first == b'"':
        texts = _decoded(_TEXTS, memoryview(data)[begin:end], at)
        return Prompt(texts[0], is_only=len(texts) == 1)
    return Prompt(read_token_ids(data, begin, at=at)[0])


def read_token_ids(data: bytes, begin: int, *, at: str) -> tuple[TokenBuffer, int]:
    """Return the token ids of the list that begins at ``begin`` in JSON, and where it ends.

    Raises :class:`InvalidRequest` naming the element of the field ``at`` that is none.
    """
    try:
        packed, end = token_ids(data, begin)
    except JsonRefused as refused:
        if data[refused.at : refused.at + 1] in (b'"', b"["):
            raise InvalidRequest(f"{at}: either token ids or texts, not both", param=at) from None
        at += refused.path
        raise InvalidRequest(f"{at}: token ids are whole numbers from 0 to {2**32 - 1}", param=at) from None
    ids = array("I")
    ids.frombytes(packed)
    return ids, end


def _decoded(decoder: "msgspec.json.Decoder[Content]", data: memoryview, at: str) -> "Content":
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise named_error(str(error), at=at) from None
