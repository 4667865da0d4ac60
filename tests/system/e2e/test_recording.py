"""A fleet records its traffic, and the recording is replayed: the same lengths, the same shared prefixes."""

import asyncio
import gzip
import json
import stat
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvrouter.cli import main
from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.recording.files import recording_files
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.tree import FrontendSettings
from kvrouter.sim.traces.read import open_trace
from tests.testing.mock_fleet import BLOCK, uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, word_ids
from tests.testing.waits import until

KV_BYTES_PER_TOKEN = 131_072
"""Of mock engines."""

SECRET_SESSION = "session-of-a-customer"
SECRET_PARENT = "parent-of-a-customer"


async def complete(here: MockServer, ids: Sequence[int], *, tokens: int = 8, **more: Any) -> int:
    response = await here.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": list(ids), "max_tokens": tokens, **more.get("body", {})},
        headers=more.get("headers", {}),
    )
    return response.status_code


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in recording_files(folder) for line in gzip.open(path)]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["kind"] == kind]


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def n_written(here: MockServer) -> float:
    telemetry = here.system.telemetry
    telemetry.render()
    return telemetry.recording_records.value()


async def test_a_recording_replays_the_sent_lengths_and_prefixes(tmp_path: Path) -> None:
    prompts = [word_ids(first=n % 3, n=40 + 16 * (n % 4)) + word_ids(first=50 + n, n=40) for n in range(12)]
    async with mock_server(
        uniform_fleet(replicas=3), recording=RecordingSettings(folder=str(tmp_path))
    ) as here:
        for at, ids in enumerate(prompts):
            assert await complete(here, ids, tokens=3 + at) == 200
        await until(lambda: n_written(here) >= len(prompts))
        page = await here.metrics()
        assert page.value("recording_active") == 1
        assert page.value("recording_dropped_total") == 0
    (path,) = recording_files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name.endswith(".jsonl.gz")
    trace = open_trace(tmp_path)
    assert (trace.info.format, trace.info.piece_tokens) == ("kvrouter.recording.v1", BLOCK)
    rows = list(trace)
    assert [row.input_tokens for row in rows] == [len(ids) for ids in prompts]
    assert [row.output_tokens for row in rows] == [3 + at for at in range(12)]
    assert rows[0].at_s == 0.0
    assert all(one.at_s < other.at_s for one, other in pairwise(rows))
    for one, sent in zip(rows, prompts, strict=True):
        for other, sent_other in zip(rows, prompts, strict=True):
            expected = min(shared_blocks(sent, sent_other) // BLOCK, len(sent) // BLOCK)
            assert shared_blocks(one.pieces, other.pieces) == expected
    out = tmp_path / "out.json"
    assert main(["replay", str(tmp_path), "--output", f"json={out}"]) == 0
    (variant,) = json.loads(out.read_text())["variants"]
    assert variant["summaries"][0]["completed"] == 12


async def test_recordings_hold_no_text_token_or_client_id(tmp_path: Path) -> None:
    ids = word_ids(first=7, n=70)
    headers = {
        "x-dynamo-session-id": SECRET_SESSION,
        "x-dynamo-parent-session-id": SECRET_PARENT,
        "x-tenant-id": "tenant-of-a-customer",
        "x-request-id": "request-of-a-customer",
    }
    hints = {"routing_constraints": {"preferred_taints": {"client/of-a-customer": 0.5}}}
    async with mock_server(uniform_fleet(), recording=RecordingSettings(folder=str(tmp_path))) as here:
        for _ in range(2):
            assert await complete(here, ids, headers=headers, body={"nvext": hints}) == 200
        answer = await here.http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "a quite secret wish"}]},
        )
        assert answer.status_code == 200
        assert await complete(here, ids, body={"model": "no-such-model-of-a-customer"}) == 404
    content = b"".join(gzip.decompress(path.read_bytes()) for path in recording_files(tmp_path))
    prompt = Prompt(ids, block_size=BLOCK, seed=hash_seed(cache_namespace="tenant-of-a-customer"))
    hashes = prompt.sequence_hashes
    spoken = [
        b"secret",
        b"customer",
        json.dumps(ids[:3]).encode()[1:-1],
        b",".join(b"%d" % i for i in ids[:3]),
    ]
    for begin in range(0, len(hashes), 8):
        number = int.from_bytes(hashes[begin : begin + 8], "little")
        spoken += [b"%d" % number, b"%016x" % number, hashes[begin : begin + 8]]
    raw = content + b"".join(bytes(row.pieces) for row in open_trace(tmp_path))
    assert [word for word in spoken if word in raw] == []
    one, other, chat = of_kind(tmp_path, "request")
    assert one["session"] == other["session"] != one["parent"]
    assert "session" not in chat
    assert one["blocks"] == other["blocks"]
    (refusal,) = of_kind(tmp_path, "refusal")
    assert (refusal["code"], refusal["http_status"]) == ("model_not_found", 404)
    assert "model" not in refusal


async def test_recordings_hold_both_legs_of_pairs_and_fleet_changes(tmp_path: Path) -> None:
    settings = RecordingSettings(folder=str(tmp_path))
    from_worker_4 = {"nvext": {"prefill_worker_id": 4}}
    async with mock_server(zoned_fleet(handoff="synchronous"), recording=settings) as here:
        assert await complete(here, word_ids(n=64), body={"nvext": {"worker_id": 2}}) == 200
        await here.kill(5)
        assert await complete(here, word_ids(n=64), body=from_worker_4) == 200
        await here.kill(6)
        await asyncio.gather(*(complete(here, word_ids(n=64), body=from_worker_4) for _ in range(2)))
    first, second, *refused = of_kind(tmp_path, "request")
    (attempt,) = first["attempts"]
    prefill, decode = attempt["legs"]
    assert (prefill["leg"], prefill["worker"], prefill["domains"]) == ("prefill", "1/0", {"zone": "a"})
    assert (decode["leg"], decode["worker"], decode["domains"]) == ("decode", "2/0", {"zone": "a"})
    assert attempt["placed_s"] <= prefill["sent_s"] <= prefill["last_s"] <= decode["sent_s"]
    assert decode["sent_s"] <= decode["first_token_s"] <= decode["last_s"] <= first["ended_s"]
    assert attempt["constraint"] == "required zone=a"
    assert (attempt["kv_bytes"], attempt["kv_bytes_reported"]) == (64 * KV_BYTES_PER_TOKEN, True)
    assert first["constraints"]["pin"] == "2"
    assert second["attempts"][0]["legs"][1]["worker"] == "6/0"
    assert [(one["status"], one["code"], one["http_status"]) for one in refused] == [
        ("failed", "no_eligible_worker", 503)
    ] * 2
    assert all(one["refusals"] and not one.get("attempts") for one in refused)
    changes = [
        (one["change"], [each["worker"] for each in one["workers"]]) for one in of_kind(tmp_path, "fleet")
    ]
    assert changes[0][0] == "all"
    assert ("left", ["5"]) in changes
    assert changes.index(("left", ["5"])) < changes.index(("left", ["6"]))
    assert [row.output_tokens for row in open_trace(tmp_path)] == [8, 8, 1, 1]


async def test_unread_calls_are_recorded_as_refusals_without_client_data(
    tmp_path: Path,
) -> None:
    settings = RecordingSettings(folder=str(tmp_path))
    front = FrontendSettings(body_max_bytes=4096, header_max_bytes=1024)
    async with mock_server(uniform_fleet(), recording=settings, frontend=front) as here:
        long = await here.http.post("/v1/completions", content=b"a" * 5000)
        assert long.status_code == 413
        elsewhere = await here.http.post("/v1/secret/customer", content=b"a" * 5000)
        assert elsewhere.status_code == 413
        headed = await here.http.post("/v1/completions", headers={"x-secret": "s" * 2000}, content=b"{}")
        assert headed.status_code == 431
        malformed = await here.http.request("CONNECT", "/v1/completions")
        assert malformed.status_code == 405
        assert await complete(here, word_ids(n=16)) == 200
    refusals = of_kind(tmp_path, "refusal")
    assert [(one["code"], one["http_status"], one.get("route")) for one in refusals] == [
        ("request_too_large", 413, "/v1/completions"),
        ("invalid_request", 431, "/v1/completions"),
    ]
    assert [one["at_s"] for one in refusals] == sorted(one["at_s"] for one in refusals)
    assert b"secret" not in b"".join(gzip.decompress(path.read_bytes()) for path in recording_files(tmp_path))
    assert len(list(open_trace(tmp_path))) == 1
