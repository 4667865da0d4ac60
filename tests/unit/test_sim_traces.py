"""Readers of traces: what each format says, and one clear error for what is wrong with it."""

import gzip
import json
from array import array
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.azure import PrefixModel, read_azure
from kvrouter.sim.traces.generated import Generator, Lengths, generate
from kvrouter.sim.traces.read import open_trace

Rows = list[dict[str, Any]]


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def mooncake(at_ms: float, tokens: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


SESSIONS: Rows = [
    {
        "id": "one",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 0.0},
            {"t": 3.0, "requests": [{"t": 0.5, "in": 64, "out": 2, "hash_ids": [9]}]},
            {"t": 30.0, "in": 200, "out": 0, "hash_ids": [1, 2, 3, 4], "think_time": 4.0},
        ],
    },
    {"id": "two", "block_size": 64, "requests": [{"t": 0.0, "in": 64, "out": 5, "hash_ids": [1]}]},
]

DYNAMO: Rows = [
    {"event_type": "request_payload", "request_id": "x"},
    {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "agent_context": {"session_id": "s"},
        "request": {
            "output_tokens": 2,
            "request_received_ms": 2_000,
            "total_time_ms": 10,
            "replay": {"trace_block_size": 4, "input_length": 8, "input_sequence_hashes": [401, 402]},
        },
    },
    {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "agent_context": {"session_id": "s"},
        "request": {
            "output_tokens": 2,
            "request_received_ms": 1_000,
            "total_time_ms": 100,
            "replay": {"trace_block_size": 4, "input_length": 6, "input_sequence_hashes": [401]},
        },
    },
]

AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content)
        return path

    return write


def test_mooncake_rows(written: Callable[[bytes], Path]) -> None:
    content = lines(mooncake(500, 700, [7, 8]), mooncake(1_500, 512, [7], output=0))
    for packed in (content, gzip.compress(content)):
        trace = open_trace(written(packed))
        assert (trace.info.format, trace.info.piece_tokens, trace.info.has_sessions) == (
            "Mooncake",
            512,
            False,
        )
        first, second = trace
        assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 700, 5)
        assert (first.pieces, first.number) == (array("Q", [7, 8]), 0)
        assert (second.at_s, second.output_tokens, second.number) == (1.0, 1, 1)
        assert list(trace) == [first, second]
    assert [row.number for row in open_trace(written(content), rows_max=1)] == [0]


def test_sessions_of_agents(written: Callable[[bytes], Path]) -> None:
    trace = open_trace(written(gzip.compress(lines(*SESSIONS))))
    assert (trace.info.piece_tokens, trace.info.has_sessions) == (64, True)
    first, sub_agent, other, last = trace
    assert [row.at_s for row in (first, sub_agent, other, last)] == [0.0, 3.5, 10.0, 30.0]
    assert (sub_agent.after, sub_agent.session) == (first.number, "one/1")
    assert (last.after, last.think_s, last.output_tokens) == (first.number, 4.0, 1)
    assert other.after is None
    assert last.pieces[:2] == first.pieces
    assert other.pieces[0] != first.pieces[0]


def test_nobody_thinks_for_longer_than_passed_between_two_requests(written: Callable[[bytes], Path]) -> None:
    turns = [{"t": t, "in": 64, "out": 1, "hash_ids": [1], "think_time": 500.0} for t in (0.0, 8.0)]
    trace = open_trace(written(lines({"id": "x", "block_size": 64, "requests": turns})))
    assert [row.think_s for row in trace] == [500.0, 8.0]


def test_dynamos_records_by_arrival(written: Callable[[bytes], Path]) -> None:
    trace = open_trace(written(lines(*DYNAMO)))
    assert (trace.info.format, trace.info.piece_tokens) == ("dynamo.request.trace.v1", 4)
    first, second = trace
    assert (first.input_tokens, first.at_s, second.at_s) == (6, 0.0, 1.0)
    assert second.after == 0
    assert second.think_s == pytest.approx(0.9)
    assert second.pieces[0] == first.pieces[0]


def test_azures_rows_with_contents_of_a_model(written: Callable[[bytes], Path]) -> None:
    path = written(AZURE)
    first, second = open_trace(path)
    assert (first.input_tokens, first.output_tokens, len(first.pieces)) == (374, 44, 6)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    alike = list(read_azure(path, PrefixModel(share=1.0, prefixes=1, covers=0.5)))
    assert alike[0].pieces[:3] == alike[1].pieces[:3]
    assert alike[0].pieces[3] != alike[1].pieces[3]
    apart = list(read_azure(path, PrefixModel(share=0.0)))
    assert not set(apart[0].pieces) & set(apart[1].pieces)
    with pytest.raises(ConfigError, match="share"):
        PrefixModel(share=2.0)


def test_a_generators_file(written: Callable[[bytes], Path]) -> None:
    text = (
        b"generate: {requests: 50, rate_per_s: 5, input: {mean: 500}, output: {mean: 9}, turn_share: 0.5}\n"
    )
    trace = open_trace(written(text))
    assert len(list(trace)) == 50
    assert trace.info.has_sessions
    with pytest.raises(ConfigError, match="rate_per_s"):
        open_trace(written(text.replace(b"rate_per_s: 5", b"rate_per_s: 0")))
    with pytest.raises(ConfigError, match="turns"):
        open_trace(written(text.replace(b"turn_share", b"turns")))


@given(
    seed=st.integers(0, 9),
    turn_share=st.floats(0.0, 1.0),
    variation=st.sampled_from([0.0, 1.0, 3.0]),
    open_sessions=st.sampled_from([1, 3, 1_000]),
)
@settings(max_examples=40)
def test_generated_traffic_is_ordered_repeatable_and_grows_by_turns(
    seed: int, turn_share: float, variation: float, open_sessions: int
) -> None:
    spec = Generator(
        requests=120,
        rate_per_s=2.0,
        input=Lengths(300.0),
        output=Lengths(20.0, sigma=0.0),
        variation=variation,
        turn_share=turn_share,
        think_s=0.5,
        tenants=3,
        system_tokens=128,
        open_sessions=open_sessions,
        seed=seed,
    )
    rows = list(generate(spec))
    assert rows == list(generate(spec))
    assert [row.number for row in rows] == list(range(120))
    assert all(one.at_s <= other.at_s for one, other in pairwise(rows))
    for row in rows:
        assert len(row.pieces) == -(-row.input_tokens // row.piece_tokens)
        if row.after is not None:
            before = rows[row.after]
            n_full = before.input_tokens // before.piece_tokens
            assert row.session == before.session
            assert row.input_tokens > before.input_tokens
            assert row.pieces[:n_full] == before.pieces[:n_full]


def test_a_million_requests_are_generated_one_by_one() -> None:
    spec = Generator(requests=1_000_000, rate_per_s=300.0, input=Lengths(12_000.0), output=Lengths(340.0))
    assert [row.number for row in islice(generate(spec), 3)] == [0, 1, 2]


NO_REPLAY = {"output_tokens": 1, "request_received_ms": 1}

GOOD = mooncake(0, 700, [7, 8])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"what is this\n", "none of the formats"),
        (b'{"a": 1}\n', "none of the formats"),
        (lines(GOOD) + b"{oops\n", r":2: JSON is malformed"),
        (lines(GOOD, {**GOOD, "timestamp": -1}), r":2: .*timestamp"),
        (lines(GOOD) + b'{"timestamp": NaN}\n', r":2: JSON is malformed"),
        (lines(mooncake(5, 700, [7, 8]), mooncake(4, 700, [7, 8])), r":2: timestamp: 4 is before 5"),
        (lines(GOOD, mooncake(1, 700, [7])), r":2: hash_ids: 1 of them.* 2 blocks"),
        (lines(GOOD, mooncake(1, 700, [7, -8])), r":2: .*hash_ids"),
        (lines(GOOD, mooncake(1, 700, [7, 1 << 64])), r":2: .*"),
        (lines(GOOD, {"timestamp": 1, "input_length": 5}), r":2: .*output_length"),
        (lines(GOOD, mooncake(1, 0, [])), r":2: .*input_length"),
        (gzip.compress(lines(*[GOOD] * 400))[:-30], "cut short|not a whole gzip"),
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
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(
    written: Callable[[bytes], Path], content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list(open_trace(written(content)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_trace(tmp_path / "nothing")
