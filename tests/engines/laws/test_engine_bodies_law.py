"""A client's call keeps its bytes, but for what must change; any metrics page is read or refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import InvalidRequest, ProtocolError
from kvrouter.core.lax import UNKNOWN, lax_bool, lax_json
from kvrouter.engines.openai.bodies import (
    ask_usage,
    body_of,
    bytes_of,
    drop,
    drop_inside,
    flag_inside,
    put,
    put_inside,
)
from kvrouter.engines.openai.failures import failure_of
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.sglang.calls import GenerateReader

SPACES = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])
ODD_VALUES = st.sampled_from(
    [
        "1.0", "1e400", "-0", "0.10", "123456789012345678901234567890",
        '"\\u00e9\\/\\ud83d\\ude00"', '{"a":1, "a" : 2}', "[ ]", "{ }", "null", '"日本"',
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
VALUES = ODD_VALUES | st.builds(
    json.dumps, JSON, indent=st.sampled_from([None, 1]), ensure_ascii=st.booleans()
)
NAMES = st.sampled_from(["model", "stream", "messages", "x y", "é"]) | st.text("abc_", min_size=1, max_size=4)
CALLS = st.dictionaries(NAMES, VALUES, max_size=6)


def written(fields: dict[str, str], space: str) -> bytes:
    """A body with these values as they are, and white space wherever it may be."""
    pairs = (f"{space}{json.dumps(name)}{space}:{space}{value}{space}" for name, value in fields.items())
    return f"{space}{{{','.join(pairs)}{space}}}{space}".encode()


def values_of(body: bytes) -> dict[str, str]:
    return {name: bytes(value).decode() for name, value in body_of(body).items()}


@given(CALLS, SPACES, NAMES, JSON)
def test_unchanged_fields_keep_their_bytes(
    fields: dict[str, str], space: str, name: str, value: object
) -> None:
    body = body_of(written(fields, space))
    assert values_of(bytes_of(body)) == fields
    put(body, **{name: value})
    once = bytes_of(body)
    after = values_of(once)
    assert json.loads(after.pop(name)) == value
    assert after == {key: said for key, said in fields.items() if key != name}
    put(body, **{name: value})
    assert bytes_of(body) == once
    drop(body, name, name)
    without = bytes_of(body)
    drop(body, name)
    assert bytes_of(body) == without
    assert values_of(without) == {key: said for key, said in fields.items() if key != name}


@given(CALLS, CALLS, SPACES, NAMES, NAMES)
def test_unchanged_fields_inside_an_object_keep_their_bytes(
    fields: dict[str, str], inner: dict[str, str], space: str, name: str, field: str
) -> None:
    fields = {**fields, name: written(inner, space).decode().strip()}
    body = body_of(written(fields, space))
    assert flag_inside(body, name, field) == lax_bool(lax_json(inner.get(field, "null").encode()))
    drop_inside(body, name, field)
    kept = {key: said for key, said in inner.items() if key != field}
    assert values_of(bytes(body[name])) == kept
    put_inside(body, name, **{field: True})
    assert values_of(bytes(body[name])) == {**kept, field: "true"}
    assert flag_inside(body, name, field) is True
    once = bytes_of(body)
    put_inside(body, name, **{field: True})
    assert bytes_of(body) == once
    assert {key: said for key, said in values_of(once).items() if key != name} == {
        key: said for key, said in fields.items() if key != name
    }


def test_drop_in_an_absent_object_does_nothing_and_put_creates_it() -> None:
    for before in (b"{}", b'{"stream_options":null}'):
        body = body_of(before)
        drop_inside(body, "stream_options", "include_usage")
        assert bytes_of(body) == before
        assert flag_inside(body, "stream_options", "include_usage") is None
        assert ask_usage(body)
        assert bytes_of(body) == b'{"stream_options":{"include_usage":true}}'


@pytest.mark.parametrize(
    "value",
    [
        '{"include_usage":true}',
        '{"include_usage":1}',
        '{"include_usage":"yes"}',
        '{"continuous_usage_stats":true}',
        '{"include_usage":false,"continuous_usage_stats":"on"}',
        '"x"',
        "[1]",
        "5",
    ],
)
def test_usage_is_not_added_if_the_client_may_have_asked_for_it(value: str) -> None:
    written = f'{{"stream_options":{value}}}'.encode()
    body = body_of(written)
    assert not ask_usage(body)
    assert bytes_of(body) == written


@pytest.mark.parametrize("value", ['{"include_usage":false,"x":1.0}', '{"x":1.0,"include_usage":null}'])
def test_usage_is_added_if_the_client_did_not_ask_for_it(value: str) -> None:
    body = body_of(f'{{"stream_options":{value}}}'.encode())
    assert ask_usage(body)
    assert values_of(bytes(body["stream_options"])) == {"include_usage": "true", "x": "1.0"}


@pytest.mark.parametrize("value", ["5", '"a"', "[1]", "true"])
def test_field_that_is_not_an_object_is_left_to_the_engine(value: str) -> None:
    written = f'{{"vllm_xargs":{value}}}'.encode()
    body = body_of(written)
    drop_inside(body, "vllm_xargs", "kv_cache_report_mode")
    assert flag_inside(body, "vllm_xargs", "kv_cache_report_mode") is UNKNOWN
    assert bytes_of(body) == written


def test_lone_surrogate_keeps_its_bytes() -> None:
    written = b'{"prompt":"\\ud800","model": "m"}'
    assert values_of(written) == {"prompt": '"\\ud800"', "model": '"m"'}
    with pytest.raises(InvalidRequest, match="JSON object"):
        body_of(b'{"prompt":"\\ud800"')


HALF = st.text(st.sampled_from('a\\"/é\n\u2028\ud83d\ude00\udfff'), max_size=5)


@given(st.dictionaries(HALF, HALF, max_size=5), st.sampled_from(["model", "m\\u006fdel", "\\u006dodel"]))
def test_field_names_are_read_right_beside_a_lone_surrogate(fields: dict[str, str], model: str) -> None:
    written = json.dumps({**fields, "half": "\ud800", "inner": {**fields, "half": "\ud800"}})
    body = body_of(f'{{"model":1,"{model}":2,{written[1:]}'.encode())
    assert bytes(body["model"]) == b"2"
    put_inside(body, "inner", added=1)
    drop_inside(body, "inner", "half")
    inner = {name: value for name, value in fields.items() if name != "half"}
    expected = {"model": 2, **fields, "half": "\ud800", "inner": {**inner, "added": 1}}
    assert json.loads(bytes_of(body)) == json.loads(json.dumps(expected))


@given(
    st.binary(max_size=40)
    | st.sampled_from([b"[]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"a":1}x'])
)
def test_any_body_is_read_or_refused(data: bytes) -> None:
    try:
        body = body_of(data)
    except InvalidRequest:
        return
    assert isinstance(json.loads(bytes_of(body)), dict)


METRIC = "vllm:cache_config_info"
LINES = st.lists(
    st.sampled_from(
        [
            "{",
            "}",
            'engine="0"',
            '="',
            '\\"',
            "\\",
            ",",
            " ",
            "1",
            "1.0",
            "NaN",
            "# HELP ",
            "# TYPE ",
            "e",
            "\n",
            "é",
        ]
    )
    | st.text(max_size=3),
    max_size=12,
)


@given(LINES)
def test_any_metrics_page_is_read_or_refused(words: list[str]) -> None:
    text = METRIC + "".join(words)
    for data in (text.encode("utf-8", "surrogatepass"), b"\xff" + text.encode("utf-8", "surrogatepass")):
        try:
            samples = read_metrics(data, (METRIC,))
        except ProtocolError:
            continue
        assert set(samples) <= {METRIC}


@given(
    st.sampled_from([400, 401, 404, 413, 422, 429, 500, 503]),
    st.binary(max_size=60)
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.fixed_dictionaries({}, optional={"error": JSON, "message": JSON, "detail": JSON, "param": JSON}),
    ),
)
def test_any_error_body_gives_a_short_message(status: int, body: bytes) -> None:
    assert 0 < len(failure_of(status, body).message) < 700


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), max_size=6), st.booleans())
def test_incremental_and_cumulative_output_ids_give_tokens_once(
    steps: list[list[int]], is_incremental: bool
) -> None:
    reader = GenerateReader()
    so_far: list[int] = []
    got: list[int] = []
    for step in steps:
        so_far += step
        meta = {
            "prompt_tokens": 3,
            "completion_tokens": len(so_far),
            "cached_tokens": 1,
            "finish_reason": None,
        }
        reported = {"text": "", "output_ids": step if is_incremental else so_far, "meta_info": meta}
        event = reader(json.dumps(reported).encode())
        got.extend(event.token_ids)
        assert event.usage is not None
        assert event.usage.cached_tokens == 1
        assert event.finish is None
    assert got == so_far
