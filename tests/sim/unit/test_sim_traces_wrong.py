"""Readers of traces: one clear error, with line and field, for what is wrong in each format."""

import gzip
import json
import math
from collections.abc import Callable
from copy import deepcopy
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.trace_rows import (
    AZURE,
    BURSTGPT,
    DYNAMO,
    GENERATOR,
    GOOD,
    HEADER,
    SESSIONS,
    VLLM_BENCH,
    by_other_names,
    dependency,
    dialogue,
    in_envelope,
    lines,
    mooncake,
    node,
    session,
    sub_agent,
    turn,
    waiting,
)


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in VLLM_BENCH.items() if name != field}


NO_REPLAY = {"output_tokens": 1, "request_received_ms": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"what is this\n", "none of the formats"),
        (b'{"a": 1}\n', "none of the formats"),
        (lines(GOOD) + b"{oops\n", r":2: JSON is malformed"),
        (lines(GOOD, {**GOOD, "timestamp": -1}), r":2: .*timestamp"),
        (lines(mooncake(5, 700, [7, 8]), mooncake(4, 700, [7, 8])), r":2: timestamp: 4 is before 5"),
        (lines(GOOD, mooncake(1, 700, [7])), r":2: hash_ids: 1 of them.* 2 blocks"),
        (lines(GOOD, {"timestamp": 1, "input_length": 5, "hash_ids": [1]}), r":2: output_length: is missing"),
        (lines(GOOD, {"timestamp": 1, "output_length": 5, "hash_ids": [1]}), r":2: input_length: is missing"),
        (lines(GOOD, {**GOOD, "input_tokens": 700}), r":2: input_tokens: is another name of input_length"),
        (lines(GOOD, {**GOOD, "created_time": 1}), r":2: created_time: is another name of timestamp, which"),
        (lines(GOOD, mooncake(1, 0, [])), r":2: .*input_length"),
        (lines(GOOD, {**GOOD, "session_id": "s"}), r":2: session_id: is there, and was not in the first row"),
        (
            lines(dialogue("s", 700, [7, 8], timestamp=1), dialogue("t", 700, [7, 8], delay=1)),
            r":2: timestamp: is missing in the first row of 't'",
        ),
        (
            lines(dialogue("s", 700, [7, 8], timestamp=5), dialogue("s", 700, [7, 8], timestamp=4)),
            r":2: timestamp: 4 is before 5 of the turn before",
        ),
        (
            lines(dialogue("s", 700, [7, 8], timestamp=5), dialogue("t", 70, [7, 8], timestamp=6)),
            r":2: hash_ids: 2 of them, where 70 tokens have 1 blocks of 512",
        ),
        (
            lines(dialogue("s", 700, [7, 8], timestamp=5), dialogue("s", 700, [9, 10], delay=6)),
            r":2: hash_ids: .*mooncake-delta",
        ),
        (
            lines(dialogue("s", 300, [7], timestamp=5), dialogue("s", 200, [8], delay=6)),
            r":2: hash_ids: .*mooncake-delta",
        ),
        (lines({**SESSIONS[0], "requests": [{"t": 1, "in": 640, "hash_ids": [1]}]}), r":1: .*hash_ids: 1 of"),
        (
            lines({"id": "x", "block_size": 4, "requests": [
                {"t": 5, "in": 4, "out": 1, "hash_ids": [1]}, {"t": 1, "in": 4, "out": 1, "hash_ids": [1]}
            ]}),
            r":1: requests\[1\].t: 1 is before 5",
        ),
        (lines(*SESSIONS, {**SESSIONS[1], "block_size": 32}), r":3: block_size: 32, and 64 above"),
        (lines(DYNAMO[0]), "no request has ended"),
        (lines({**DYNAMO[1], "request": NO_REPLAY}), r":1: request.replay: is missing"),
        (lines(GOOD) + b'{"a":' + b"[" * 100_000 + b"\n", r":2: "),
        (AZURE + b"2023-11-16 18:15:40,1,1\n", r":4: TIMESTAMP: is before"),
        (AZURE + b"2023-11-16 18:16:40,1\n", r":4: 2 columns"),
        (AZURE + b"2023-11-16 18:16:40,-1,1\n", r":4: ContextTokens: '-1'"),
        (AZURE + b"yesterday,1,1\n", r":4: TIMESTAMP: 'yesterday'"),
        (BURSTGPT + b"39,ChatGPT,1,1,2,API log\n", r":6: Timestamp: is before"),
        (BURSTGPT + b"nan,ChatGPT,1,1,2,API log\n", r":6: Timestamp: 'nan' is not a number of seconds"),
        (BURSTGPT + b"41,ChatGPT,1,1\n", r":6: 4 columns, where the header has 6"),
        (BURSTGPT + b"41,ChatGPT,1.5,1,2,API log\n", r":6: Request tokens: '1.5'"),
        (BURSTGPT + b"41,ChatGPT,16777217,1,2,API log\n", r":6: Request tokens: '16777217' is not a number"),
        (BURSTGPT + b"41,ChatGPT,1,-1,2,API log\n", r":6: Response tokens: '-1'"),
        (BURSTGPT + b"41,GPT-4,1,1,2,API log\n", r":6: Model: 'GPT-4', and 'ChatGPT' above; .*--model"),
        (lines(without("input_lens")), r":1: input_lens: is missing: .*--save-detailed"),
        (lines(without("output_lens")), r":1: output_lens: is missing: .*--save-detailed"),
        (lines(without("start_times")), r":1: start_times: is missing, .*--rate-per-s"),
        (lines({**VLLM_BENCH, "output_lens": [1]}), r":1: output_lens: 1 of them, and 3 input_lens"),
        (lines({**VLLM_BENCH, "input_lens": [1, 2, 0]}), r":1: input_lens\[2\]: "),
        (lines({**VLLM_BENCH, "input_lens": [1, 2, 1 << 25]}), r":1: input_lens\[2\]: "),
        (lines({**VLLM_BENCH, "start_times": [1, 2, -3]}), r":1: start_times\[2\]: "),
        (lines(VLLM_BENCH, VLLM_BENCH), r":2: is another result"),
    ],
)  # fmt: skip
def test_trace_mistake_is_refused_with_its_line_and_field(
    write_trace: Callable[[bytes], Path], content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list(open_trace(write_trace(content)))


def test_missing_trace_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_trace(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"generate:\n  requests: 3\n\n  rate_per_s: .nan\n",
            r":4: generate.rate_per_s: expected `float` >=",
        ),
        (b"generate:\n  requests: 3\n  requests: 3\n", r":2: generate.requests: given again on line 3"),
        (b"generate:\n  requests: 3\n  rate: 3\n", r":3: generate.rate: is not known"),
        (b"generate:\n  requests: [3\n", r":\d: not YAML"),
        (b"generate:\n  requests: 3\n", r":1: generate.rate_per_s: is missing"),
        (b'{"generate": {"requests": 3,\n"requests": 3}}\n', r":1: generate.requests: given again on line 2"),
        (b"generate: 7\n", r":1: generate: expected `object`, got `int`"),
        (b"generate: {}\nseed: 7\n", r":2: seed: is not known"),
        (b"generate: {requests: !!bool maybe}\n", r"not YAML: a value does not fit its tag"),
        (b"generate: {requests: \x00}\n", r"not YAML: .*special characters are not allowed"),
        (b'{"generate": {"requests": 3, "rate_per_s": NaN}}\n', r":1: generate.rate_per_s: expected `float`"),
        (b'{"generate": \n', r"not YAML"),
        (b"generate: {}\n#" + b"-" * (1 << 16), "none of the formats"),
        (b"generate: {}\n" + b"\n" * (1 << 16) + b"#", "none of the formats"),
    ],
)
def test_generator_file_mistake_is_refused_with_its_line_and_field(
    write_trace: Callable[[bytes], Path], content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_trace(write_trace(content))


WHERE: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "mooncake": (GOOD, "timestamp", "hash_ids", "input_length"),
    "mooncake with sessions": (
        dialogue("s", 700, [7, 8], timestamp=3.0),
        "timestamp",
        "hash_ids",
        "input_length",
    ),
    "mooncake by other names": (by_other_names(GOOD), "created_time", "hash_ids", "input_tokens"),
    "mooncake with sessions by other names": (
        by_other_names(dialogue("s", 700, [7, 8], timestamp=3.0)),
        "created_time",
        "hash_ids",
        "input_tokens",
    ),
    "workflows": (waiting("a", timestamp=3.0, wait_for=[]), "timestamp", "hash_ids", "input_length"),
    "workflows 2": (node("a", 3.0), "not_before_ms", "hash_ids", "input_length"),
    "agentic": (session(turn(1.0)), "requests[0].t", "requests[0].hash_ids", "requests[0].in"),
    "sub-agents": (
        session(turn(0.0), sub_agent(0.0, turn(1.0))),
        "requests[1].requests[0].t",
        "requests[1].requests[0].hash_ids",
        "requests[1].requests[0].in",
    ),
    "dynamo": (
        DYNAMO[1],
        "request.request_received_ms",
        "request.replay.input_sequence_hashes",
        "request.replay.input_length",
    ),
    "dynamo in envelopes": (
        in_envelope(DYNAMO[1]),
        "event.request.request_received_ms",
        "event.request.replay.input_sequence_hashes",
        "event.request.replay.input_length",
    ),
}
"""A good row of each format of JSON rows; where its time, its names of blocks and its tokens are."""

HEADERS = {"workflows 2": [HEADER]}
"""What comes before the rows of a format."""

NO_TIMES: tuple[object, ...] = (math.nan, math.inf, -math.inf, -1, 1e16, 10**400, "1", None, [])
NO_NAMES: tuple[object, ...] = (math.nan, -1, -(1 << 64), 1 << 64, 10**30, 1.5, "1", None)
NO_TOKENS: tuple[object, ...] = (math.nan, -1, 0, 1 << 32, 1 << 64, 1.5, "1")


ABSENT = object()


def changed(row: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    row = deepcopy(row)
    inside: Any = row
    *way, last = [
        int(part) if part.isdigit() else part for part in field.replace("[", ".").replace("]", "").split(".")
    ]
    for part in way:
        inside = inside[part]
    if value is ABSENT:
        del inside[last]
    else:
        inside[last] = value
    return row


def wrong_rows() -> list[tuple[str, dict[str, Any], dict[str, Any], str]]:
    rows = []
    for name, (good, time, names, tokens) in WHERE.items():
        rows += [(name, good, changed(good, time, value), time) for value in NO_TIMES]
        rows += [(name, good, changed(good, f"{names}[0]", value), f"{names}[0]") for value in NO_NAMES]
        rows += [(name, good, changed(good, tokens, value), tokens) for value in NO_TOKENS]
        rows += [(name, good, changed(good, names, []), names)]
    return rows


@pytest.mark.parametrize(("name", "good", "wrong", "field"), wrong_rows())
def test_wrong_value_is_refused_with_line_and_field(
    write_trace: Callable[[bytes], Path], name: str, good: dict[str, Any], wrong: dict[str, Any], field: str
) -> None:
    header = HEADERS.get(name, [])
    path = write_trace(lines(*header, good, wrong))
    with pytest.raises(ConfigError) as raised:
        list(open_trace(path))
    place = f"{path}:{len(header) + 2}:"
    named = "timestamp" if field == "created_time" and wrong[field] is None else field  # it is missing then
    assert str(raised.value).startswith(f"{place} {named}: "), name


@pytest.mark.parametrize("name", WHERE)
def test_missing_field_is_refused_by_name(write_trace: Callable[[bytes], Path], name: str) -> None:
    good, time, *_ = WHERE[name]
    header = HEADERS.get(name, [])
    path = write_trace(lines(*header, good, changed(good, time, ABSENT)))
    with pytest.raises(ConfigError) as raised:
        list(open_trace(path))
    named = "timestamp" if time == "created_time" else time
    assert str(raised.value).startswith(f"{path}:{len(header) + 2}: {named}: is missing")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("NaN,1,1", "TIMESTAMP"),
        ("-2023-11-16 18:16:40,1,1", "TIMESTAMP"),
        ("2023-11-16,1,1", "TIMESTAMP"),
        ("2023-13-16 18:16:40,1,1", "TIMESTAMP"),
        ("2023-11-16 18:16:40+99:00,1,1", "TIMESTAMP"),
        ("\u0662023-11-16 18:16:40,1,1", "TIMESTAMP"),
        ("2023-11-16 18:15:50,1,1", "TIMESTAMP"),
        ("2023-11-16 18:16:40,NaN,1", "ContextTokens"),
        ("2023-11-16 18:16:40,0,1", "ContextTokens"),
        (f"2023-11-16 18:16:40,{1 << 32},1", "ContextTokens"),
        ("2023-11-16 18:16:40,1,nan", "GeneratedTokens"),
        ("2023-11-16 18:16:40,1,-1", "GeneratedTokens"),
        ("2023-11-16 18:16:40,1,1.5", "GeneratedTokens"),
        (f"2023-11-16 18:16:40,1,{'9' * 5_000}", "GeneratedTokens"),
    ],
)
def test_wrong_azure_value_is_refused_with_line_and_field(
    write_trace: Callable[[bytes], Path], row: str, field: str
) -> None:
    path = write_trace(AZURE + row.encode() + b"\n")
    with pytest.raises(ConfigError) as raised:
        list(open_trace(path))
    assert str(raised.value).startswith(f"{path}:4: {field}: ")


CONTENTS = {name: lines(*HEADERS.get(name, []), *[good] * 3) for name, (good, *_) in WHERE.items()} | {
    "mooncake with sessions": lines(*(dialogue("s", 700 + n, [7, 8], timestamp=n) for n in range(3))),
    "workflows": lines(waiting("a", timestamp=3), waiting("b", "a", delay=1), waiting("c", "a", "b")),
    "workflows 2": lines(HEADER, node("a", 3), node("b", 5, dependency("a", 1)), node("c", 4)),
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "vllm bench": lines(VLLM_BENCH),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_truncated_gzip_trace_is_refused_with_its_line(
    write_trace: Callable[[bytes], Path], name: str
) -> None:
    packed = gzip.compress(CONTENTS[name])
    for end in range(3, len(packed)):
        path = write_trace(packed[:end])
        with pytest.raises(ConfigError, match=rf"{path}:[1-6]: the gzip file is cut short here"):
            list(open_trace(path))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A trace of any format in which something else stands in some places, or a generator's file."""
    content = draw(st.sampled_from([*CONTENTS.values(), json.dumps({"generate": GENERATOR}).encode()]))
    scrap = st.one_of(
        st.binary(max_size=4),
        st.sampled_from(
            [b"NaN", b"-1", b"null", b"1e999", b"[]", b"{}", b'"', b"!!int ", b"&a ", b"\n", b"9" * 30]
        ),
    )
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(scrap) + content[at + draw(st.integers(0, 5)) :]
    if not draw(st.booleans()):
        return content
    packed = gzip.compress(content)
    at = draw(st.integers(0, len(packed)))
    return packed[:at] + draw(st.binary(max_size=2)) + packed[at + draw(st.integers(0, 20)) :]


@given(content=damaged() | st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
@settings(max_examples=500)
def test_any_bytes_are_a_trace_or_a_config_error(scratch_trace: Path, content: bytes) -> None:
    scratch_trace.write_bytes(content)
    rows: list[TraceRequest] = []
    message = str(scratch_trace)
    try:
        rows.extend(islice(open_trace(scratch_trace), 100))
    except ConfigError as error:
        message = str(error)
    assert message.startswith(str(scratch_trace))
    for number, row in enumerate(rows):
        assert row.number == number
        assert row.input_tokens >= 1 <= row.output_tokens
        assert len(row.pieces) in (
            row.input_tokens // row.piece_tokens,
            -(-row.input_tokens // row.piece_tokens),
        )
        assert all(wait.number < number and 0.0 <= wait.think_s < math.inf for wait in row.waits)
        assert 0.0 <= row.not_before_s <= row.at_s
    assert all(one.at_s <= other.at_s < math.inf for one, other in pairwise(rows))


AMOUNTS = st.sampled_from([0, 5e-324, 1e-200, 1e-9, 1, 7.5, 1e9]) | st.floats(0, 1e9)

LAWS = st.fixed_dictionaries(
    {"mean": AMOUNTS}, optional={"sigma": st.floats(0, 5), "max": st.integers(1, 10**8)}
)


@given(
    described=st.fixed_dictionaries(
        {"requests": st.integers(1, 10**8), "rate_per_s": AMOUNTS, "input": LAWS, "output": LAWS},
        optional={
            "turn": LAWS,
            "variation": AMOUNTS,
            "burst": st.fixed_dictionaries({"every_s": AMOUNTS, "for_s": AMOUNTS, "factor": AMOUNTS}),
            "tenants": st.integers(1, 1_000),
            "tenant_exponent": st.floats(0, 10),
            "turn_share": st.floats(0, 1),
            "think_s": AMOUNTS,
        },
    )
)
def test_any_generator_numbers_are_a_trace_or_a_config_error(
    scratch_trace: Path, described: dict[str, Any]
) -> None:
    scratch_trace.write_text(json.dumps({"generate": described}))
    message = f"{scratch_trace}:1: generate."
    rows: list[TraceRequest] = []
    try:
        rows.extend(islice(open_trace(scratch_trace), 5))
    except ConfigError as error:
        message = str(error)
    assert message.startswith(f"{scratch_trace}:1: generate.")
    assert all(one.at_s <= other.at_s < math.inf for one, other in pairwise(rows))
