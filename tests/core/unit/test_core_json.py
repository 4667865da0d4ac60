"""core.json: long texts are counted before anything is built of them, and one error comes out."""

import tracemalloc
from typing import Annotated

import msgspec
import pytest

from kvrouter.core.errors import InvalidRequest, ProtocolError
from kvrouter.core.json import (
    CONTAINERS_MAX,
    TEXT_BYTES_MAX,
    UNSCANNED_BYTES,
    VALUES_MAX,
    Unreadable,
    bounds_of,
    converted,
    decoded,
    parsed,
)
from kvrouter.engines.openai.answer_events import (
    ODD_CHOICES_READ,
    AnswerEvent,
    AnswerUsage,
    UnreadEvent,
    read_event,
)
from kvrouter.engines.openai.failures import error_message
from kvrouter.engines.sglang.calls import GenerateReader

MANY = 2_000_000


class Part(msgspec.Struct):
    a: int = 0
    parts: "tuple[Part, ...]" = ()


class Whole(msgspec.Struct, rename="camel"):
    some_parts: tuple[Part, ...] = ()
    free: dict[str, object] = {}
    raw: msgspec.Raw = msgspec.Raw(b"null")
    few: Annotated[tuple[int, ...], msgspec.Meta(max_length=2)] = ()


WHOLE = msgspec.json.Decoder(Whole)

OVER = {
    "choices": (b'"choices":[' + b"{}," * MANY + b"{}]", "choices: more lists and objects"),
    "token ids": (b'"choices":[{"token_ids":[' + b"1," * MANY + b"1]}]", "choices: more values"),
    "params": (
        b'"kv_transfer_params":{"x":[' + b"[]," * MANY + b"[]]}",
        "kv_transfer_params: more lists and objects",
    ),
    "fields of params": (
        b'"kv_transfer_params":{' + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}",
        "kv_transfer_params: more values",
    ),
    "nested": (b'"x":' + b"[" * 1_000_000 + b"]" * 1_000_000, "inside each other"),
    "text": (
        b'"choices":[{"text":"\xf0\x9f\x98\x80' + b"x" * TEXT_BYTES_MAX + b'"}]',
        "choices: more text",
    ),
}


def read_and_peak_bytes(data: bytes) -> tuple[AnswerEvent, int]:
    tracemalloc.start()
    try:
        return read_event(data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("over", "why"), OVER.values(), ids=OVER.keys())
def test_an_answer_over_the_bounds_is_refused_before_objects_are_built(over: bytes, why: str) -> None:
    """A field that is read alone is copied to be counted; any object of its values would come on top."""
    event, peak_bytes = read_and_peak_bytes(b'{"usage":{"prompt_tokens":7},' + over + b"}")
    assert isinstance(event, UnreadEvent)
    assert event.why.startswith("the engine's answer: ")
    assert why in event.why
    assert (event.token_ids, event.text_chars, event.kv_transfer_params) == ((), None, None)
    assert len(event.choices) <= 1
    assert event.usage == (None if why == "inside each other" else AnswerUsage(prompt_tokens=7))
    assert peak_bytes < len(over) + 100_000


def test_only_a_few_of_many_unreadable_choices_are_read() -> None:
    event, _ = read_and_peak_bytes(b'{"choices":[' + b"1," * (VALUES_MAX - 2) + b"1]}")
    assert isinstance(event, UnreadEvent)
    assert len(event.choices) == ODD_CHOICES_READ


def test_sglang_answers_and_error_bodies_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="more values"):
        GenerateReader()(b'{"output_ids":[' + b"1," * MANY + b"1]}")
    message, _ = error_message(b'{"detail":[' + b"{}," * MANY + b"{}]}")
    assert message.startswith('{"detail":[{},{}')


def test_fields_skipped_by_the_decoder_are_not_counted() -> None:
    """Log probabilities of a long answer are millions of numbers of which nothing is built."""
    logprobs = b'{"content":[' + b'{"token":"a","bytes":[97]},' * CONTAINERS_MAX + b"{}]}"
    answer = b'{"choices":[{"text":"a","finish_reason":"stop","logprobs":%b}],"prompt_logprobs":%b}'
    event = read_event(answer % (logprobs, logprobs))
    assert event.choices[0].text == "a"
    assert event.finish is not None


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b'{"someParts":[X]}', "someParts"),
        (b'{"someParts":[{"parts":[X]}]}', "someParts"),
        (b'{"free":{"y":[X]}}', "free"),
        (b'{"some\\u0050arts":[X]}', "some\\u0050arts"),
        (b'{"x":1,"free":{"raw":[X]}}', "free"),
    ],
)
def test_built_objects_are_counted_at_any_depth(text: bytes, path: str) -> None:
    with pytest.raises(Unreadable, match="more lists and objects") as refused:
        parsed(WHOLE, text.replace(b"X", b"{}," * CONTAINERS_MAX + b"{}"))
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", [b'{"some_parts":[X]}', b'{"raw":[X]}', b'{"x":{"free":[X]}}'])
def test_objects_that_are_not_built_are_not_counted(text: bytes) -> None:
    parsed(WHOLE, text.replace(b"X", b"{}," * CONTAINERS_MAX + b"{}"))


def test_raw_fields_are_counted_without_their_content() -> None:
    fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
    assert len(parsed(fields, b'{"a":[' + b"{}," * MANY + b"{}]}")) == 1
    with pytest.raises(Unreadable, match="more values"):
        parsed(fields, b"{" + b",".join(b'"%d":1' % number for number in range(VALUES_MAX + 1)) + b"}")


@pytest.mark.parametrize("data", [b"{", b"[" * 40_000, b'{"few":[1,2,3]}', b'"\xff"', b"NaN", b"1e999"])
def test_each_failure_raises_the_callers_error_and_names_the_source(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^the page: ") as failed:
        decoded(WHOLE, data, "the page")
    assert failed.value.param == "the page"
    with pytest.raises(InvalidRequest, match=r"^the page: ") as refused:
        decoded(WHOLE, data, "the page", param="page", error=InvalidRequest)
    assert refused.value.param == "page"


def test_an_error_reports_whether_only_the_shape_is_wrong() -> None:
    shapes = []
    for data in (b'{"few":"x"}', b"{", b"x" * UNSCANNED_BYTES * 2):
        with pytest.raises(Unreadable) as failed:
            parsed(WHOLE, data)
        shapes.append(failed.value.has_wrong_shape)
    assert shapes == [True, False, False]


def test_built_objects_are_converted_or_raise_the_same_error() -> None:
    assert converted({"few": [1]}, Whole) == Whole(few=(1,))
    with pytest.raises(Unreadable, match="few"):
        converted({"few": "x"}, Whole)


def test_unscanned_short_texts_stay_within_the_bounds() -> None:
    bounds = bounds_of(object)
    for unit in (b"[],", b"1,", b'"",'):
        text = b"[" + unit * ((UNSCANNED_BYTES - 3) // len(unit)) + b"1]"
        assert len(text) <= UNSCANNED_BYTES
        bounds.scan(text)


def test_answer_bounds_are_computed_once() -> None:
    assert bounds_of(AnswerEvent) is bounds_of(AnswerEvent)
