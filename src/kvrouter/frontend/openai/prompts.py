"""The messages of chats, the prompts of completions and lists of token ids, read from a scanned body.

They are read after everything else of a call was checked: they are what is long in a body.

Token ids are read natively and stay packed: as Python objects a million of them would hold the interpreter
for a tenth of a second, and ten times the memory.
"""

import re
from array import array
from typing import NamedTuple, TypeVar

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.json_bounds import JsonRefused, token_ids
from kvrouter.core.requests import TokenBuffer
from kvrouter.frontend.openai.decode import named_error
from kvrouter.frontend.openai.scanned import ScannedBody

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
