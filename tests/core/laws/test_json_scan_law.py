"""The native scan and Python's own parser agree on what is JSON, and on how much of it there is."""

import itertools
import json
import re
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.json_bounds import JsonBounds, JsonRefused, token_ids

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
BLANKS = st.text(alphabet=" \n\r\t", max_size=5)
LAYOUTS = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])


MANY = 10**6


def bounds(
    *,
    depth: int = MANY,
    values: int = MANY,
    items: int = MANY,
    numbers: int = MANY,
    blanks_in_row: int = MANY,
    blanks: int = MANY,
) -> JsonBounds:
    return JsonBounds(
        depth=depth,
        values=values,
        items=items,
        numbers=numbers,
        text_bytes=MANY,
        short_bytes=MANY,
        key_bytes=MANY,
        number_bytes=MANY,
        blanks_in_row=blanks_in_row,
        blanks=blanks,
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


def _size_of_texts(value: object) -> tuple[int, int]:
    """Characters, and bytes of UTF-8, of the strings in a value, names of fields apart."""
    if isinstance(value, str):
        return len(value), len(value.encode("utf-8", "surrogatepass"))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    sizes = [_size_of_texts(each) for each in inner]
    return sum(chars for chars, _ in sizes), sum(text_bytes for _, text_bytes in sizes)


@given(VALUES, LAYOUTS)
@example({"a": ["\ud83d\ude00 é€\n", {"b": "\ud800"}]}, {})
@example({"a": ["\U0001f600 é€\n", {"b": "plain"}]}, {"ensure_ascii": False})
def test_scan_passes_valid_json_and_reports_its_values_and_fields(
    value: object, layout: dict[str, object]
) -> None:
    data = json.dumps(value, **layout).encode("utf-8", "replace")  # type: ignore[arg-type]
    fields, values = bounds().scan(data)
    assert values + _numbers(value) == _all_values(json.loads(data))
    if isinstance(value, dict):
        again = json.loads(data)
        read = {json.loads(f'"{name}"'): at for name, at in fields.items()}
        assert {name: json.loads(data[begin:end]) for name, (begin, end, _, _) in read.items()} == again
        assert {name: (chars, text_bytes) for name, (_, _, chars, text_bytes) in read.items()} == {
            name: _size_of_texts(inner) for name, inner in again.items()
        }
    else:
        assert fields == {}


@given(VALUES, LAYOUTS, st.data())
def test_scan_and_python_parser_agree_on_json_with_changed_bytes(
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
def test_scan_and_python_parser_agree_on_text_of_json_characters(text: str) -> None:
    assert passes(text.encode(), bounds()) == is_json(text.encode())


@given(st.binary(max_size=60))
def test_scan_and_python_parser_agree_on_any_bytes(data: bytes) -> None:
    assert passes(data, bounds()) == is_json(data)


@given(VALUES, st.integers(1, 5), st.integers(1, 30), st.integers(1, 6), st.integers(0, 12))
def test_scan_refuses_json_exactly_when_over_a_bound(
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


@given(VALUES, st.lists(BLANKS, min_size=1), st.integers(0, 4), st.integers(0, 40))
def test_blanks_are_counted_outside_of_strings_only(
    value: object, between: list[str], blanks_in_row: int, blanks: int
) -> None:
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|[^\s,:"\[\]{}]+|[,:\[\]{}]', json.dumps(value))
    runs = [run for run, _ in zip(itertools.cycle(between), range(len(tokens) + 1), strict=False)]
    data = "".join(run + token for run, token in zip(runs, [*tokens, ""], strict=True)).encode()
    assert json.loads(data) == json.loads(json.dumps(value))
    fits = max(map(len, runs)) <= blanks_in_row and sum(map(len, runs)) <= blanks
    assert passes(data, bounds(blanks_in_row=blanks_in_row, blanks=blanks)) == fits


def _numbers(value: object) -> int:
    counted = Counted()
    counted.take(value)
    return counted.numbers


def _all_values(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_all_values(item) for item in inner)


IDS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(IDS, LAYOUTS, st.sampled_from(["", " ", "\n\t"]), st.sampled_from(["", "]", ', "b": [2]}']))
def test_token_ids_equal_those_of_pythons_parser(
    ids: list[int], layout: dict[str, object], before: str, behind: str
) -> None:
    written = json.dumps(ids, **layout)  # type: ignore[arg-type]
    data = (before + written + behind).encode()
    packed, end = token_ids(data, len(before))
    assert (array("I", packed).tolist(), end) == (ids, len(before + written))


@given(IDS, st.sampled_from([-1, 2**32, 10**30, 1.0, True, None, "1", [1], {}]), IDS)
def test_an_invalid_token_id_is_named_by_its_position(
    before: list[int], wrong: object, behind: list[int]
) -> None:
    data = json.dumps([*before, wrong, *behind]).encode()
    with pytest.raises(JsonRefused) as caught:
        token_ids(data, 0)
    assert (caught.value.kind, caught.value.path) == ("token_id", f"[{len(before)}]")
    assert data[caught.value.at :].startswith(json.dumps(wrong).encode())
