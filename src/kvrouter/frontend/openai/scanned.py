"""Scanned bodies: JSON within bounds of counts and depth.

Every decoder of this package takes a :class:`ScannedBody`, so nothing can be built of a body unbounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.json_bounds import BLANKS_IN_ROW_MAX, BLANKS_MAX, JsonBounds, JsonRefused

DEPTH_MAX = 64
VALUES_MAX = 65_536
ITEMS_MAX = 8_192
NUMBERS_MIN = 262_144
"""As many token ids are decoded whatever the contexts are, so that the error can say how many they were."""

TEXT_BYTES_MAX = 16 * 1024 * 1024
SHORT_BYTES_MAX = 16_384
KEY_BYTES_MAX = 4_096
NUMBER_BYTES_MAX = 512
BLANKS_PER_NUMBER = 8
"""A list of token ids that is indented has about as many before each."""

SHOWN_BYTES_MAX = 16
TOKEN_FIELDS = ("prompt", "token_ids", "nvext.token_data")
SHORT_FIELDS = ("nvext",)
"""What an error about them quotes is short."""

_NAME = msgspec.json.Decoder(str)


class BodyOverBounds(InvalidRequest):
    """The body is JSON, and would become more objects than a request needs."""

    code = "body_over_bounds"

    def __init__(self, message: str, *, param: str | None, bound: str) -> None:
        super().__init__(message, param=param)
        self.bound = bound


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBounds:
    """What one body may hold. The scan itself takes about a millisecond a megabyte, whatever it holds."""

    depth: int = DEPTH_MAX
    """Lists and objects inside each other."""
    values: int = VALUES_MAX
    """Values of all kinds, token ids apart."""
    items: int = ITEMS_MAX
    """Elements of one list, token ids apart, or fields of one object."""
    numbers: int = NUMBERS_MIN
    """Token ids."""
    text_bytes: int = TEXT_BYTES_MAX
    """Strings that are not plain ASCII, as images are: as they are written or as Python holds them,
    whichever is more. To decode a megabyte stops everybody for some 3 ms, and one wide character lets each
    of its string take four bytes."""

    @property
    def blanks(self) -> int:
        """Blanks outside of strings: those of an indented body with as many token ids as may be."""
        return max(BLANKS_MAX, BLANKS_PER_NUMBER * self.numbers)


class ScannedBody(NamedTuple):
    """A body that is JSON within its bounds.

    ``fields`` are those of the outermost object: where each begins and ends, and how many characters, and
    bytes of UTF-8, the strings in it have.
    """

    data: bytes
    fields: Mapping[str, tuple[int, int, int, int]]

    def raw(self, field: str) -> memoryview | None:
        """The JSON of a field, None where it is absent."""
        found = self.fields.get(field)
        return None if found is None else memoryview(self.data)[found[0] : found[1]]


def scanned(data: bytes, bounds: BodyBounds) -> ScannedBody:
    """Look through a body; others run meanwhile, if it is long.

    Raises :class:`InvalidRequest` with the field's path as ``param``, :class:`BodyOverBounds` for one that
    holds too much.
    """
    try:
        fields, _ = _native(bounds).scan(data)
    except JsonRefused as refused:
        raise _refusal(refused, bounds, data) from None
    if any("\\" in name for name in fields):
        # Of a name that is written in two ways the last field counts, as for the engine that gets the body.
        in_order = sorted(fields.items(), key=itemgetter(1))
        fields = {_unescaped(name): span for name, span in in_order}
    return ScannedBody(data, fields)


def _unescaped(name: str) -> str:
    """The name that is meant; one with half a surrogate pair, which no decoder takes, as it is written."""
    try:
        return _NAME.decode(f'"{name}"')
    except msgspec.DecodeError:
        return name


@lru_cache(maxsize=64)
def _native(bounds: BodyBounds) -> JsonBounds:
    return JsonBounds(
        depth=bounds.depth,
        values=bounds.values,
        items=bounds.items,
        numbers=bounds.numbers,
        text_bytes=bounds.text_bytes,
        short_bytes=SHORT_BYTES_MAX,
        key_bytes=KEY_BYTES_MAX,
        number_bytes=NUMBER_BYTES_MAX,
        blanks_in_row=BLANKS_IN_ROW_MAX,
        blanks=bounds.blanks,
        number_fields=TOKEN_FIELDS,
        short_fields=SHORT_FIELDS,
    )


def _refusal(refused: JsonRefused, bounds: BodyBounds, data: bytes) -> InvalidRequest:
    path = refused.path
    if refused.kind == "syntax":
        found = data[refused.at : refused.at + SHOWN_BYTES_MAX].decode("utf-8", "replace")
        where = f"at byte {refused.at}, {found!r}" if found else "at the end"
        return InvalidRequest(f"the body is not valid JSON: {refused.what} ({where})")
    if refused.kind == "not_finite":
        what = "must be a finite number"
        return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)
    over = {
        "depth": f"more than {bounds.depth} lists and objects inside each other (KVROUTER_BODY_MAX_DEPTH)",
        "values": f"with it the body holds more than {bounds.values} values (KVROUTER_BODY_MAX_VALUES)",
        "items": f"more than {bounds.items} elements or fields (KVROUTER_BODY_MAX_ITEMS)",
        "numbers": f"more than {bounds.numbers} token ids (KVROUTER_BODY_MAX_TOKEN_IDS)",
        "text_bytes": f"more than {bounds.text_bytes} bytes of text (KVROUTER_BODY_MAX_TEXT_BYTES)",
        "short_bytes": f"a text is longer than {SHORT_BYTES_MAX} bytes",
        "key_bytes": f"a field's name is longer than {KEY_BYTES_MAX} bytes",
        "number_bytes": f"a number is longer than {NUMBER_BYTES_MAX} bytes",
        "blanks": f"with these the body holds more than {BLANKS_IN_ROW_MAX} blanks in a row, "
        f"or {bounds.blanks} in all",
    }[refused.kind]
    return BodyOverBounds(f"{path}: {over}" if path else over, param=path or None, bound=refused.kind)
