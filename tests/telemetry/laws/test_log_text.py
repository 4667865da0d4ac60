"""The fields of a log line are shown as Python shows them: numbers as ``%.6g``, plain texts as they are."""

import json
from enum import IntEnum, StrEnum

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.telemetry.log_forms import VALUE_MAX_CHARS, LogValue, event_text


class _Name(StrEnum):
    PLAIN = "plain"
    SPACED = "of two words"


class _Number(IntEnum):
    SEVEN = 7


def shown(value: LogValue) -> str:
    return event_text("stop", {"detail": value}).removeprefix("stop detail=")


@given(st.floats() | st.floats(-1e7, 1e7) | st.integers(-(10**7), 10**7).map(lambda n: n / 10))
@example(-0.0)
@example(999_999.5)
@example(999_999.4)
@example(0.000_099_999_95)
@example(0.000_1)
@example(100_000.0)
@example(1e100)
@example(5e-324)
@example(2.5e-5)
def test_float_has_six_significant_digits(number: float) -> None:
    assert shown(number) == "%.6g" % number  # noqa: UP031 - the form that the line has
    assert shown(np.float64(number)) == shown(number)


@given(st.integers())
@example(2**63)
@example(-(2**63))
def test_whole_number_has_all_its_digits(number: int) -> None:
    assert shown(number) == str(number)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=127), min_size=1))
def test_text_is_quoted_only_where_it_has_to_be(text: str) -> None:
    is_plain = text.isascii() and text.isprintable() and not set(text) & set(" \"'\\")
    assert (shown(text) == text) is is_plain
    assert shown(text).startswith('"') is not is_plain


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("a\x85b\u2028c\x9b31m\x7f\U000e0001")
def test_text_reads_back_and_has_printable_characters_only(text: str) -> None:
    line = shown(text)
    assert line.isprintable()
    assert line == text or json.loads(line) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (True, "true"),
        (False, "false"),
        ("", '""'),
        ("x" * VALUE_MAX_CHARS, "x" * VALUE_MAX_CHARS),
        ("x" * (VALUE_MAX_CHARS + 1), f'"{"x" * VALUE_MAX_CHARS}…"'),
        ("é", '"é"'),
        ("\ud800", '"?"'),
        (_Name.PLAIN, "plain"),
        (_Name.SPACED, '"of two words"'),
        (_Number.SEVEN, "7"),
    ],
)
def test_each_kind_of_value_has_its_form(value: LogValue, expected: str) -> None:
    assert shown(value) == expected


def test_fields_keep_their_order() -> None:
    assert event_text("stop", {"b": 1, "a": "x", "c": None}) == "stop b=1 a=x c=-"
    assert event_text("stop", {}) == "stop"
