"""The native scan and Python's own parser agree on what is JSON, and on how much of it there is."""

import json
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.json_bounds import JsonBounds, JsonRefused

TOKEN_FIELDS = ("prompt", "token_ids", "messages.a")
KEYS = st.sampled_from(["prompt", "token_ids", "messages", "a", "ключ", 'q"uote', "back\\slash"]) | st.text(
    max_size=6
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
)
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(0, 9), max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)
LAYOUTS = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])


MANY = 10**6


def bounds(*, depth: int = MANY, values: int = MANY, items: int = MANY, numbers: int = MANY) -> JsonBounds:
    return JsonBounds(
        depth=depth,
        values=values,
        items=items,
        numbers=numbers,
        text_bytes=MANY,
        short_bytes=MANY,
        key_bytes=MANY,
        number_bytes=MANY,
        number_fields=TOKEN_FIELDS,
        short_fields=("nvext",),
    )


def not_finite(name: str) -> object:
    raise ValueError(name)


def is_json(data: bytes) -> bool:
    """As Python's parser says, without the three words that JSON does not have."""
    try:
        json.loads(data.decode(), parse_constant=not_finite)
    except (ValueError, RecursionError):
        return False
    return True


def passes(data: bytes, within: JsonBounds) -> bool:
    try:
        within.scan(data)
    except JsonRefused:
        return False
    return True


@dataclass
class Counted:
    """What is in a value, counted by hand."""

    depth: int = 0
    values: int = 0
    items: int = 0
    numbers: int = 0

    def take(self, value: object, depth: int = 0, top: str = "") -> None:
        self.values += 1
        if not isinstance(value, list | dict):
            return
        self.depth = max(self.depth, depth + 1)
        inner = list(value.items()) if isinstance(value, dict) else [("", item) for item in value]
        in_tokens = isinstance(value, list) and top in TOKEN_FIELDS
        items = 0
        for key, item in inner:
            if in_tokens and isinstance(item, int | float) and not isinstance(item, bool):
                self.numbers += 1
                continue
            items += 1
            inside = top
            if isinstance(value, dict) and depth < 2 and top not in TOKEN_FIELDS:
                inside = f"{top}.{key}" if depth else key
            self.take(item, depth + 1, inside)
        self.items = max(self.items, items)


@given(VALUES, LAYOUTS)
def test_what_is_json_passes(value: object, layout: dict[str, object]) -> None:
    data = json.dumps(value, **layout).encode("utf-8", "replace")  # type: ignore[arg-type]
    fields, values = bounds().scan(data)
    assert values + _numbers(value) == _all_values(json.loads(data))
    if isinstance(value, dict):
        read = {json.loads(f'"{name}"'): json.loads(data[begin:end]) for name, (begin, end) in fields.items()}
        assert read == json.loads(data)
    else:
        assert fields == {}


@given(VALUES, LAYOUTS, st.data())
def test_a_byte_changed_matters_to_both_or_to_neither(
    value: object, layout: dict[str, object], data: st.DataObject
) -> None:
    text = bytearray(json.dumps(value, **layout).encode("utf-8", "replace"))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        how = data.draw(st.sampled_from(["change", "drop", "insert", "cut"]))
        byte = data.draw(st.sampled_from(list(b' \n{}[],:"\\-+.eE0123456789tfnNIu\x00\x1f\x7f\x80\xff')))
        if how == "change":
            text[at] = byte
        elif how == "drop":
            del text[at]
        elif how == "insert":
            text.insert(at, byte)
        else:
            del text[at:]
        if not text:
            break
    assert passes(bytes(text), bounds()) == is_json(bytes(text))


@given(st.text(alphabet=' {}[],:"\\-+.eE01tfnrualse', max_size=30))
@example('{"a":1}}')
@example('"\\u00e9\\ud800"')
def test_any_text_of_the_letters_of_json(text: str) -> None:
    assert passes(text.encode(), bounds()) == is_json(text.encode())


@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    assert passes(data, bounds()) == is_json(data)


@given(VALUES, st.integers(1, 5), st.integers(1, 30), st.integers(1, 6), st.integers(0, 12))
def test_a_bound_is_passed_exactly_when_it_is(
    value: object, depth: int, values: int, items: int, numbers: int
) -> None:
    counted = Counted()
    counted.take(value)
    fits = (
        counted.depth <= depth
        and counted.values <= values
        and counted.items <= items
        and counted.numbers <= numbers
    )
    within = bounds(depth=depth, values=values, items=items, numbers=numbers)
    assert passes(json.dumps(value).encode(), within) == fits


def _numbers(value: object) -> int:
    counted = Counted()
    counted.take(value)
    return counted.numbers


def _all_values(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_all_values(item) for item in inner)
