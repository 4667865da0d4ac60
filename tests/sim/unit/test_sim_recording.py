"""Recordings as traces: what a crash left of one is read, and what cannot be is named by file and line."""

import base64
import gzip
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import Wait

NAME = "recording-20260101T000000Z-0000000{}-00000{}.jsonl.gz"

Line = dict[str, Any]


def header(*, started_s: float = 1000.0, salt: str = "aa", schema: str = "kvrouter.recording.v1") -> Line:
    return {
        "kind": "header", "schema": schema, "version": "1", "recording": "0000000a", "part": 1,
        "started_s": started_s, "salt": salt,
    }  # fmt: skip


FLEET: Line = {"kind": "fleet", "at_s": 0.0, "change": "all", "workers": []}
REFUSAL: Line = {"kind": "refusal", "at_s": 0.0, "code": "x", "http_status": 404, "route": "/v1/completions"}


def request(
    at_s: float, *names: int, tail: int = 3, output: int = 5, took_s: float = 1.0, **more: Any
) -> Line:
    return {
        "kind": "request", "at_s": at_s, "model": "m", "input_tokens": 4 * len(names) + tail,
        "output_tokens": output, "max_tokens": 9, "block_size": 4, "status": "finished", "ended_s": took_s,
        "blocks": base64.b64encode(array("Q", names).tobytes()).decode(), **more,
    }  # fmt: skip


def packed(*lines: Line) -> bytes:
    return gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def folder_of(tmp_path: Path, *files: bytes) -> Path:
    for at, content in enumerate(files):
        (tmp_path / NAME.format("a", at + 1)).write_bytes(content)
    return tmp_path


def test_requests_of_all_files_come_in_order_of_arrival(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        packed(header(), FLEET, request(5.0, 7, 8, output=0, status="failed"), request(3.0, 7)),
        packed(header(), FLEET, request(4.0, took_s=9.0)),
    )
    (tmp_path / "one").mkdir()
    later = packed(header(started_s=1000.5), FLEET, request(3.0, 1 << 63, status="cancelled"))
    (tmp_path / "one" / NAME.format("b", 1)).write_bytes(later)
    said: list[str] = []
    trace = open_trace(folder, warn=said.append)
    assert (trace.info.format, trace.info.piece_tokens, trace.info.has_sessions) == (
        "kvrouter.recording.v1",
        4,
        False,
    )
    rows = list(trace)
    assert [(row.at_s, row.input_tokens, row.output_tokens) for row in rows] == [
        (0.0, 7, 5),
        (0.5, 7, 5),
        (1.0, 3, 5),
        (2.0, 11, 1),
    ]
    assert [list(row.pieces) for row in rows] == [[7], [1 << 63], [], [7, 8]]
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert said == []
    single = list(open_trace(tmp_path / "one" / NAME.format("b", 1)))
    assert [row.input_tokens for row in single] == [7]
    assert [row.number for row in open_trace(folder, rows_max=1)] == [0]


def test_turns_wait_for_their_session_and_its_parent(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        packed(
            header(),
            request(0.0, session="s", took_s=2.0),
            request(3.0, session="s", took_s=1.0),
            request(5.0, session="t", parent="s"),
            request(6.0, session="s", took_s=9.0),
            request(7.0, session="u", parent="s"),
            request(8.0, session="t", parent="s"),
        ),
    )
    trace = open_trace(folder)
    assert trace.info.has_sessions
    assert [(row.session, row.waits) for row in trace] == [
        ("s", ()),
        ("s", (Wait(0, 1.0),)),
        ("t", (Wait(1, 1.0),)),
        ("s", (Wait(1, 2.0),)),
        ("u", ()),
        ("t", (Wait(2, 2.0),)),
    ]


def test_truncated_recording_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    lines = [header(), FLEET, *(request(float(n), n, n + 1, n + 2) for n in range(40))]
    content = packed(*lines)
    plain = gzip.decompress(content)
    path = tmp_path / NAME.format("a", 1)
    for cut in (plain[:-9], content[: len(content) // 2], content[:-4]):
        path.write_bytes(cut)
        said: list[str] = []
        trace = open_trace(tmp_path, warn=said.append)
        rows = list(trace)
        assert 0 < len(rows) <= 40
        assert [row.pieces[0] for row in rows] == list(range(len(rows)))
        (what,) = said
        assert "is cut short" in what
        assert str(path) in what
    assert len(rows) == 40  # only the end of gzip was missing


def test_empty_recording_file_is_skipped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, packed(header(), request(0.0)), b"", packed(header()))
    assert len(list(open_trace(folder))) == 1


def test_unfinished_recording_file_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME.format('a', 1)}.part"
    path.write_bytes(packed(header(), request(0.0)) + packed(request(1.0)))
    said: list[str] = []
    assert len(list(open_trace(tmp_path, warn=said.append))) == 2
    assert said == [f"{path}: was not ended: its frontend was killed, or records on"]


def test_warnings_of_missing_records_come_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, packed(header(), REFUSAL, request(0.0)), packed(header(salt="bb"), REFUSAL))
    said: list[str] = []
    trace = open_trace(folder, warn=said.append)
    assert (len(list(trace)), len(list(trace))) == (1, 1)
    assert [what.removeprefix(f"{folder}: ")[:8] for what in said] == ["2 salts:", "2 calls "]


def test_recording_of_several_models_needs_one_to_be_named(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, packed(header(), request(0.0), request(1.0, 5, 6, model="other", block_size=5))
    )
    with pytest.raises(ConfigError, match=r"2 models .* \(m, other\)") as caught:
        open_trace(folder)
    assert caught.value.param == "model"
    with pytest.raises(ConfigError, match="recorded: m, other"):
        open_trace(folder, model="another")
    assert [row.input_tokens for row in open_trace(folder, model="m")] == [3]
    mooncake = tmp_path / "mooncake"
    mooncake.write_text('{"timestamp": 0, "input_length": 5, "output_length": 4, "hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match="only a recording"):
        open_trace(mooncake, model="m")


WRONG = {
    "its header": (FLEET, request(0.0)),
    "begins with its header, and has one": (header(), header()),
    "schema: 'v9'": (header(), header(schema="v9")),
    "blocks: 8 bytes, where 3 tokens": (header(), request(0.0, 7) | {"input_tokens": 3}),
    "base64 encoded string - at `$.blocks`": (header(), request(0.0, 7) | {"blocks": "§"}),
    "block_size: 2, and 4 above": (header(), request(0.0), request(0.0) | {"block_size": 2}),
    "input_tokens: must be": (header(), request(0.0) | {"input_tokens": 0}),
    "missing required field `ended_s`": (header(), request(0.0)),
    "Invalid value 'other'": (header(), {"kind": "other"}),
    ">= 0": (header(), request(0.0) | {"output_tokens": -1}),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_line_of_a_recording_is_refused_by_file_and_number(tmp_path: Path, what: str) -> None:
    lines = [dict(line) for line in WRONG[what]]
    if "ended_s" in what:
        del lines[-1]["ended_s"]
    number = 1 if what == "its header" else len(lines)
    if what.startswith("schema"):
        lines = lines[1:]
        number = 1
    folder = folder_of(tmp_path, packed(*lines, request(9.0)))
    with pytest.raises(ConfigError) as caught:
        open_trace(folder)
    assert f"{NAME.format('a', 1)}:{number}: " in caught.value.message
    assert what in caught.value.message


def test_folder_without_recorded_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recording is there"):
        open_trace(tmp_path)
    with pytest.raises(ConfigError, match="no request is recorded"):
        open_trace(folder_of(tmp_path, packed(header(), FLEET)))


WORKER: Line = {
    "worker": "1", "model": "m", "role": "both", "block_size": 4, "context_length": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (FLEET | {"at_s": 1e10}, "at_s"),
        (FLEET | {"at_s": -1e10}, "at_s"),
        (REFUSAL | {"at_s": 1e300}, "at_s"),
        (request(1e12), "at_s"),
        (request(1.0, took_s=1e300), "ended_s"),
        (request(1.0, first_token_s=1e10), "first_token_s"),
        (request(1.0) | {"max_tokens": 1 << 60}, "max_tokens"),
        (FLEET | {"workers": [WORKER | {"dp_size": 1 << 40}]}, "workers[0].dp_size"),
        (FLEET | {"workers": [WORKER | {"dp_size": 0}]}, "workers[0].dp_size"),
        (FLEET | {"workers": [WORKER | {"block_size": 0}]}, "workers[0].block_size"),
        (FLEET | {"workers": [WORKER | {"kv_blocks": 1 << 60}]}, "workers[0].kv_blocks"),
        (FLEET | {"workers": [WORKER] * 16_385}, "workers"),
    ],
)
def test_out_of_range_figure_of_a_recording_is_refused_by_field(
    tmp_path: Path, line: Line, field: str
) -> None:
    folder = folder_of(tmp_path, packed(header(), line, request(1.0)))
    with pytest.raises(ConfigError) as wrong:
        open_trace(folder)
    assert ":2: " in wrong.value.message
    assert f"$.{field}`" in wrong.value.message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_non_finite_time_of_a_recording_is_refused(tmp_path: Path, constant: str) -> None:
    text = json.dumps(request(1.0)).replace('"at_s": 1.0', f'"at_s": {constant}').encode() + b"\n"
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in (header(), FLEET))
    with pytest.raises(ConfigError, match=":3: "):
        open_trace(folder_of(tmp_path, gzip.compress(lines + text)))
    with pytest.raises(ConfigError, match="started_s"):
        open_trace(folder_of(tmp_path, packed(header(started_s=1e12), FLEET, request(1.0))))
