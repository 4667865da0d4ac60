"""Readers of traces: what each format says."""

import gzip
import json
from array import array
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.azure import PrefixModel, read_azure
from kvrouter.sim.traces.generated import Generator, Lengths, generate
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import Wait
from tests.testing.trace_rows import (
    AZURE,
    AZURE_HEADER,
    BURSTGPT,
    DYNAMO,
    GENERATOR,
    GOOD,
    HEADER,
    SESSIONS,
    VLLM_BENCH,
    ended,
    in_envelope,
    lines,
    mooncake,
    node,
    session,
    sub_agent,
    turn,
)


def test_mooncake_rows_are_read_with_times_lengths_and_pieces(write_trace: Callable[[bytes], Path]) -> None:
    content = lines(mooncake(500, 700, [7, 8]), mooncake(1_500, 512, [7], output=0))
    for packed in (content, gzip.compress(content)):
        trace = open_trace(write_trace(packed))
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
    assert [row.number for row in open_trace(write_trace(content), rows_max=1)] == [0]


def test_agentic_sessions_are_read_with_sub_agents_and_waits(write_trace: Callable[[bytes], Path]) -> None:
    trace = open_trace(write_trace(gzip.compress(lines(*SESSIONS))))
    assert (trace.info.piece_tokens, trace.info.has_sessions) == (64, True)
    first, sub_agent, other, last = trace
    assert [row.at_s for row in (first, sub_agent, other, last)] == [0.0, 3.5, 10.0, 30.0]
    assert ([wait.number for wait in sub_agent.waits], sub_agent.session) == ([first.number], "one/1")
    assert (last.waits, last.output_tokens) == ((Wait(first.number, 4.0),), 1)
    assert other.waits == ()
    assert last.pieces[:2] == first.pieces
    assert other.pieces[0] != first.pieces[0]


def test_think_time_is_at_most_the_time_between_two_requests(
    write_trace: Callable[[bytes], Path],
) -> None:
    turns = [{"t": t, "in": 64, "out": 1, "hash_ids": [1], "think_time": 500.0} for t in (0.0, 8.0)]
    trace = open_trace(write_trace(lines({"id": "x", "block_size": 64, "requests": turns})))
    assert [wait.think_s for row in trace for wait in row.waits] == [8.0]


@pytest.mark.parametrize(
    ("requests", "think_s"),
    [
        ((turn(0.0, api_time=3.0), turn(10.0, think_time=6.0)), 6.0),
        ((turn(0.0, api_time=3.0), turn(10.0, think_time=90.0)), 7.0),
        ((turn(0.0, api_time=3.0), turn(10.0)), 7.0),
        ((turn(0.0, api_time=30.0), turn(10.0)), 0.0),
        ((turn(0.0), turn(100.0)), 100.0),
        ((turn(0.0, api_time=None), turn(100.0, think_time=None)), 100.0),
        ((turn(0.0), turn(100.0, think_time=0.0)), 0.0),
        ((turn(0.0, api_time=20.0), sub_agent(100.0, turn(0.0, think_time=0.0))), 80.0),
    ],
)
def test_think_time_follows_from_stamps_api_time_and_stated_think_time(
    write_trace: Callable[[bytes], Path], requests: tuple[dict[str, Any], ...], think_s: float
) -> None:
    _, last = open_trace(write_trace(lines(session(*requests))))
    assert last.waits == (Wait(0, think_s),)


def test_sub_agent_without_requests_is_skipped(write_trace: Callable[[bytes], Path]) -> None:
    nothing = {"t": 2.0, "type": "subagent", "requests": None}
    content = lines(session(turn(0.0), sub_agent(1.0), nothing, turn(3.0)), session(id="y"))
    assert [(row.at_s, [wait.number for wait in row.waits]) for row in open_trace(write_trace(content))] == [
        (0.0, []),
        (3.0, [0]),
    ]


def test_nested_sub_agents_are_read_at_any_depth(write_trace: Callable[[bytes], Path]) -> None:
    inner = turn(1.0)
    for _ in range(150):
        inner = sub_agent(1.0, inner)
    first, last = open_trace(write_trace(lines(session(turn(0.0), inner))))
    assert (last.at_s, [wait.number for wait in last.waits]) == (151.0, [first.number])
    assert last.session.count("/") == 150


OWN_CLOCK = sub_agent(50.0, turn(0.0), turn(60.0))
SESSION_CLOCK = sub_agent(50.0, turn(50.5), turn(60.0))


@pytest.mark.parametrize(
    ("agents", "arrivals"),
    [
        ((OWN_CLOCK,), [50.0, 110.0]),
        ((SESSION_CLOCK,), [50.5, 60.0]),
        ((sub_agent(0.0), SESSION_CLOCK), [50.5, 60.0]),
        (
            (sub_agent(50.4, turn(50.0), turn(60.0)),),
            [50.4, 60.0],
        ),  # the agent's is not rounded, the turn's is
        ((SESSION_CLOCK, OWN_CLOCK), [50.0, 100.5, 110.0, 110.0]),  # the second says that both count from 50
    ],
)
def test_sub_agents_on_their_own_clock_and_on_the_sessions_are_told_apart(
    write_trace: Callable[[bytes], Path], agents: tuple[dict[str, Any], ...], arrivals: list[float]
) -> None:
    content = lines(session(*agents))
    assert [row.at_s for row in open_trace(write_trace(content))] == arrivals
    assert [row.at_s for row in open_trace(write_trace(lines(session(turn(0.0)), session(*agents))))] == [
        0.0,
        *(10.0 + at_s for at_s in arrivals),
    ]


def test_clock_of_sub_agents_is_one_for_the_whole_file(write_trace: Callable[[bytes], Path]) -> None:
    trace = open_trace(write_trace(lines(session(SESSION_CLOCK), session(OWN_CLOCK))))
    for _ in range(2):
        assert [row.at_s for row in trace] == [60.0, 100.5, 110.0, 120.0]


def test_global_block_names_are_shared_by_sessions_and_local_ones_are_not(
    write_trace: Callable[[bytes], Path],
) -> None:
    def pieces(*scopes: str) -> list[int]:
        rows = [session(turn(0.0), hash_id_scope=scope) for scope in scopes]
        return [row.pieces[0] for row in open_trace(write_trace(lines(*rows)))]

    assert len(set(pieces("global", "global"))) == 1
    assert len(set(pieces("local", "local"))) == 2
    assert len(set(pieces("global", "local", "local"))) == 3
    with pytest.raises(ConfigError, match=":1: hash_id_scope: invalid enum value 'file'"):
        pieces("file")


def test_sessions_are_read_lazily_as_they_begin(write_trace: Callable[[bytes], Path]) -> None:
    content = lines(session(turn(0.0), turn(9.0), turn(11.0)), session(turn(0.0)), session(turn(-1.0)))
    rows = iter(open_trace(write_trace(content)))
    assert [row.at_s for row in islice(rows, 4)] == [0.0, 9.0, 10.0, 11.0]
    with pytest.raises(ConfigError, match=r":3: requests\[0\].t"):
        next(rows)


def test_dynamo_records_are_read_in_order_of_arrival(write_trace: Callable[[bytes], Path]) -> None:
    trace = open_trace(write_trace(lines(*DYNAMO)))
    assert (trace.info.format, trace.info.piece_tokens) == ("dynamo.request.trace.v1", 4)
    first, second = trace
    assert (first.input_tokens, first.at_s, second.at_s) == (6, 0.0, 1.0)
    assert [wait.number for wait in second.waits] == [0]
    assert [wait.think_s for wait in second.waits] == pytest.approx([0.9])
    assert second.pieces[0] == first.pieces[0]


def test_dynamo_records_in_sink_envelopes_read_the_same(write_trace: Callable[[bytes], Path]) -> None:
    plain = list(open_trace(write_trace(lines(*DYNAMO))))
    assert list(open_trace(write_trace(lines(*map(in_envelope, DYNAMO))))) == plain
    later = [msgspec.structs.replace(row, line=row.line + 1) for row in plain]
    assert list(open_trace(write_trace(lines(in_envelope(DYNAMO[0]), *DYNAMO)))) == later


@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        (lines(GOOD, GOOD), [1, 2]),
        (lines(GOOD) + b"\n" + lines(GOOD), [1, 3]),
        (AZURE, [2, 3]),
        (lines(session(turn(0.0), turn(20.0)), session(turn(1.0))), [1, 2, 1]),
        (lines(ended(8), ended(7)), [2, 1]),
    ],
)
def test_requests_name_the_line_they_come_from(
    write_trace: Callable[[bytes], Path], content: bytes, numbers: list[int]
) -> None:
    path = write_trace(content)
    assert [row.place for row in open_trace(path)] == [
        f"{path}:{line}: request {number}" for number, line in enumerate(numbers)
    ]


@given(arrivals=st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_dynamo_records_may_stand_in_any_order(scratch_trace: Path, arrivals: list[int]) -> None:
    scratch_trace.write_bytes(
        lines(*(ended(at * 1e3, output_tokens=index + 1) for index, at in enumerate(arrivals)))
    )
    trace = open_trace(scratch_trace)
    by_arrival = sorted(range(len(arrivals)), key=lambda index: arrivals[index])
    for _ in range(2):
        assert [(row.at_s, row.output_tokens) for row in trace] == [
            (arrivals[index] - min(arrivals), index + 1) for index in by_arrival
        ]


def test_dynamo_trace_has_sessions_where_any_request_has_one(write_trace: Callable[[bytes], Path]) -> None:
    assert open_trace(write_trace(lines(ended(1), ended(2, "s"), ended(3)))).info.has_sessions
    assert not open_trace(write_trace(lines(ended(1), ended(2)))).info.has_sessions


def test_dynamo_record_added_between_two_readings_is_refused(write_trace: Callable[[bytes], Path]) -> None:
    trace = open_trace(write_trace(lines(ended(1))))
    write_trace(lines(ended(1), ended(2)))
    with pytest.raises(ConfigError, match=":2: was not there when the file was read before"):
        list(trace)


def test_no_rows_beyond_the_maximum_are_read(write_trace: Callable[[bytes], Path]) -> None:
    no_hashes = ended(9)
    no_hashes["request"]["replay"]["input_sequence_hashes"] = []
    for content in (
        lines(GOOD, GOOD) + b"?\n",
        AZURE + b"?\n",
        lines(session(turn(0.0), turn(1.0))) + b"?\n",
        lines(ended(8), ended(7), no_hashes),
    ):
        path = write_trace(content)
        assert [row.number for row in open_trace(path, rows_max=2)] == [0, 1]
        with pytest.raises(ConfigError, match=r":(2|3|4): "):
            list(open_trace(path, rows_max=3))


def test_azure_rows_get_contents_from_a_prefix_model(write_trace: Callable[[bytes], Path]) -> None:
    path = write_trace(AZURE)
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


@pytest.mark.parametrize(
    ("stamp", "at_s"),
    [
        ("2023-11-16 18:15:47", 1.0),
        ("2023-11-16T18:15:47", 1.0),
        ("2023-11-16 18:15:47.5", 1.5),
        ("2023-11-16 18:15:47.123456789", 1.123457),
        ("2023-11-16 18:15:47Z", 1.0),
        ("2023-11-16 18:15:47.25+00:00", 1.25),
        ("2023-11-16T20:15:47+02:00", 1.0),
        ("2023-11-16 20:15:47+0200", 1.0),
    ],
)
def test_azure_time_stamps_are_read_in_every_form(
    write_trace: Callable[[bytes], Path], stamp: str, at_s: float
) -> None:
    content = f"{AZURE_HEADER}2023-11-16 18:15:46,9,9\r\n{stamp},9,9\r\n".encode()
    first, second = open_trace(write_trace(content))
    assert first.at_s == 0.0
    assert second.at_s == pytest.approx(at_s, abs=1e-6)


def test_answer_of_zero_tokens_is_read_as_one_token(write_trace: Callable[[bytes], Path]) -> None:
    no_answer = ended(1, output_tokens=0)
    for content in (
        f"{AZURE_HEADER}2023-11-16 18:15:46,9,0\n".encode(),
        lines(mooncake(0, 512, [1], output=0)),
        lines(session({**turn(0.0), "out": 0})),
        lines(session({key: value for key, value in turn(0.0).items() if key != "out"})),
        lines(no_answer),
    ):
        (row,) = open_trace(write_trace(content))
        assert (row.output_tokens, row.has_answer) == (1, False)


def test_byte_order_mark_at_the_start_is_ignored(write_trace: Callable[[bytes], Path]) -> None:
    generator = b"generate: {requests: 1, rate_per_s: 1, input: {mean: 9}, output: {mean: 9}}"
    for content in (AZURE, lines(GOOD), lines(*SESSIONS), lines(*DYNAMO), generator):
        marked = b"\xef\xbb\xbf" + content
        rows = list(open_trace(write_trace(content)))
        assert list(open_trace(write_trace(marked))) == rows
        assert list(open_trace(write_trace(gzip.compress(marked)))) == rows


def test_generator_file_is_read_as_a_trace(write_trace: Callable[[bytes], Path]) -> None:
    text = (
        b"generate: {requests: 50, rate_per_s: 5, input: {mean: 500}, output: {mean: 9}, turn_share: 0.5}\n"
    )
    trace = open_trace(write_trace(text))
    assert len(list(trace)) == 50
    assert trace.info.has_sessions
    with pytest.raises(ConfigError, match="rate_per_s"):
        open_trace(write_trace(text.replace(b"rate_per_s: 5", b"rate_per_s: 0")))
    with pytest.raises(ConfigError, match="turns"):
        open_trace(write_trace(text.replace(b"turn_share", b"turns")))


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"generate": GENERATOR}).encode(),
        json.dumps({"generate": GENERATOR}, separators=(",", ":")).encode(),
        json.dumps({"generate": GENERATOR}, indent="\t").encode(),
        b"{generate: {requests: 3, rate_per_s: 5, input: {mean: 5.0e2}, output: {mean: 9}}}",
    ],
)
def test_generator_file_in_json_is_read(write_trace: Callable[[bytes], Path], content: bytes) -> None:
    assert len(list(open_trace(write_trace(content)))) == 3
    assert len(list(open_trace(write_trace(gzip.compress(content))))) == 3


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
        for wait in row.waits:
            before = rows[wait.number]
            n_full = before.input_tokens // before.piece_tokens
            assert row.session == before.session
            assert row.input_tokens > before.input_tokens
            assert row.pieces[:n_full] == before.pieces[:n_full]


def test_generator_yields_requests_one_by_one() -> None:
    spec = Generator(requests=1_000_000, rate_per_s=300.0, input=Lengths(12_000.0), output=Lengths(340.0))
    assert [row.number for row in islice(generate(spec), 3)] == [0, 1, 2]


def read(path: Path, **options: Any) -> list[tuple[float, int, int]]:
    return [(row.at_s, row.input_tokens, row.output_tokens) for row in open_trace(path, **options)]


def test_burstgpt_rows_are_arrivals_and_lengths_without_shared_prefixes(
    write_trace: Callable[[bytes], Path],
) -> None:
    path = write_trace(BURSTGPT)
    assert read(path) == [(0.0, 300, 40), (3.5, 70, 1), (28.0, 128, 9)]
    trace = open_trace(path)
    names = [name for row in trace for name in row.pieces]
    assert len(names) == len(set(names)) == 5 + 2 + 2
    assert trace.info.format == "BurstGPT"
    assert "no two share a prefix" in trace.info.notes[0]


def test_burstgpt_model_is_chosen_and_columns_may_stand_anywhere(
    write_trace: Callable[[bytes], Path],
) -> None:
    path = write_trace(
        b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
        b"1,s,0.5,GPT-4,10,2,12,API log\r\n2,s,0.5,ChatGPT,20,3,23,API log\r\n5,s,1,GPT-4,30,4,34,API log\r\n"
    )
    assert read(path, model="GPT-4") == [(0.0, 10, 2), (4.0, 30, 4)]
    assert read(path, model="ChatGPT") == [(0.0, 20, 3)]
    with pytest.raises(ConfigError, match=r"model: .* no prompt for 'gpt-4', and begins with 'GPT-4'"):
        read(path, model="gpt-4")
    with pytest.raises(ConfigError, match=r"model: .* has no rows$"):
        read(write_trace(b"Timestamp,Model,Request tokens,Response tokens\n"), model="gpt-4")


def test_burstgpt_model_without_a_name_is_one_too(write_trace: Callable[[bytes], Path]) -> None:
    header = b"Timestamp,Model,Request tokens,Response tokens\n"
    assert read(write_trace(header + b"1,,10,2\n2,,20,3\n")) == [(0.0, 10, 2), (1.0, 20, 3)]
    with pytest.raises(ConfigError, match=r":3: Model: 'GPT-4', and '' above"):
        read(write_trace(header + b"1,,10,2\n2,GPT-4,20,3\n"))


def test_vllm_bench_result_is_a_trace_in_the_order_of_its_start_times(
    write_trace: Callable[[bytes], Path],
) -> None:
    path = write_trace(lines(VLLM_BENCH))
    assert read(path) == [(0.0, 70, 1), (0.25, 300, 40), (3.75, 130, 9)]
    assert [len(row.pieces) for row in open_trace(path)] == [2, 5, 3]
    assert [note.split(",")[0] for note in open_trace(path).info.notes] == [
        "the trace has the lengths of prompts alone: no two share a prefix",
    ]
    with pytest.raises(ConfigError, match=r"rate-per-s: is for .* without times; .* is vllm bench"):
        open_trace(path, rate_per_s=2.0)


def test_arrivals_of_a_vllm_bench_result_without_times_are_drawn_at_a_rate(
    write_trace: Callable[[bytes], Path],
) -> None:
    result = {**VLLM_BENCH, "input_lens": [10] * 2_000, "output_lens": [2] * 2_000}
    del result["start_times"]
    path = write_trace(lines(result))
    drawn = read(path, rate_per_s=4.0)
    assert drawn == read(path, rate_per_s=4.0)
    assert drawn[-1][0] == pytest.approx(500.0, rel=0.1)
    assert (
        "--rate-per-s draws arrivals, 4 a second on average" in open_trace(path, rate_per_s=4.0).info.notes[1]
    )
    assert read(path, rate_per_s=8.0)[-1][0] == pytest.approx(drawn[-1][0] / 2)


def test_rate_of_a_trace_that_cannot_have_one_is_refused(write_trace: Callable[[bytes], Path]) -> None:
    for rows, name in (
        ([HEADER, node("plan", 0.0)], "dynamo.agentic_mooncake"),
        (SESSIONS, "agentic sessions"),
        ([GOOD], "Mooncake"),
    ):
        path = write_trace(lines(*rows))
        with pytest.raises(ConfigError, match=rf"rate-per-s: is for .* without times; .* is {name}$"):
            open_trace(path, rate_per_s=1.0)
    for rate_per_s in (0.0, -1.0, float("nan"), float("inf"), 5e-324):
        with pytest.raises(ConfigError, match=r"rate-per-s: .* is not from 1e-06 to 1e"):
            open_trace(path, rate_per_s=rate_per_s)


def test_mooncake_rows_without_time_stamps_come_at_a_rate(write_trace: Callable[[bytes], Path]) -> None:
    row = {name: value for name, value in GOOD.items() if name != "timestamp"}
    path = write_trace(lines(*[row] * 500))
    with pytest.raises(ConfigError, match=r":1: timestamp: is missing, .* --rate-per-s"):
        read(path)
    drawn = read(path, rate_per_s=2.0)
    assert drawn[0][0] == 0.0
    assert drawn[-1][0] == pytest.approx(250.0, rel=0.15)
    assert open_trace(path, rate_per_s=2.0).info.notes == (
        "the trace has no times: --rate-per-s draws arrivals, 2 a second on average",
    )
    with pytest.raises(ConfigError, match=":2: timestamp: is there, and was not in the first row"):
        read(write_trace(lines(row, GOOD)), rate_per_s=2.0)
