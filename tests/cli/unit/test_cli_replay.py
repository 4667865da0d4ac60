"""``kvrouter replay`` as its user types it."""

import json
import os
import re
from pathlib import Path

import pytest

from kvrouter.cli import main
from kvrouter.cli.replay import run as replay_run
from kvrouter.sim.replay.sim_fleet import SlotLoads
from kvrouter.sim.replay.simulation import Simulation
from tests.testing.calls import MakeFail
from tests.testing.trace_rows import lines, session, turn

ROWS = "".join(
    json.dumps({"timestamp": 100 * n, "input_length": 600, "output_length": 4, "hash_ids": [n % 3, 9]}) + "\n"
    for n in range(12)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROWS)
    return path


def run(*arguments: str) -> int:
    return main(["replay", *arguments])


def test_compared_policies_share_a_report_and_one_seed_repeats_its_bytes(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = "kvrouter,dynamo:overlap_weight=4,temperature=0.2,kvrouter:overlap_score_weight=2"
    written = []
    for name in ("a.json", "b.json"):
        path = tmp_path / name
        assert run(str(trace), "--compare", policies, "--policy", "random", "--output", f"json={path}") == 0
        written.append(path.read_bytes())
    assert written[0] == written[1]
    report = json.loads(written[0])
    assert [variant["name"] for variant in report["variants"]] == [
        "random",
        "kvrouter",
        "dynamo:overlap_weight=4,temperature=0.2",
        "kvrouter:overlap_score_weight=2",
    ]
    assert report["dispatch"] == "by time stamp"
    assert all(variant["summaries"][0]["completed"] == 12 for variant in report["variants"])
    output = capsys.readouterr().out
    assert "Mooncake, dispatched by time stamp" in output
    assert "lmetric" not in output


def test_replay_sweeps_fleet_keys_over_seeds_with_events(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, events = tmp_path / "fleet.yaml", tmp_path / "events.yaml"
    fleet.write_text("version: 1\nmodels: [{name: m}]\nworkers: [{name: w, replicas: 2}]\n")
    events.write_text("events:\n- {at_s: 0.5, what: die}\n- {at_s: 0.6, what: join, group: w}\n")
    path = tmp_path / "out.json"
    arguments = ("--fleet", str(fleet), "--sweep", "workers[0].replicas=1,3", "--seeds", "2")
    assert run(str(trace), *arguments, "--events", str(events), "--output", f"json={path}") == 0
    report = json.loads(path.read_text())
    assert report["events"] == [
        {"at_s": 0.5, "what": "die", "which": "all workers", "change": ""},
        {"at_s": 0.6, "what": "join", "which": "group w", "change": ""},
    ]
    one, three = report["variants"]
    assert (one["name"], one["seeds"]) == ("kvrouter [workers[0].replicas=1]", [0, 1])
    assert three["name"] == "kvrouter [workers[0].replicas=3]"
    assert one["summaries"][0]["errors"]
    assert "no_eligible_worker" in capsys.readouterr().out


def test_cost_of_kv_is_in_the_table_and_in_the_json_where_priced(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, path = tmp_path / "fleet.yaml", tmp_path / "out.json"
    fleet.write_text(
        "version: 1\nmodels: [{name: m}]\n"
        "topology:\n  levels: [zone]\n"
        "  links: {across: {latency_s: 0.001, bandwidth_bytes_per_s: 1.0e9, price_per_gb: 100}}\n"
        "workers:\n- {name: p, role: prefill, domains: {zone: a}}\n"
        "- {name: d, role: decode, domains: {zone: b}}\n"
    )
    assert run(str(trace), "--fleet", str(fleet), "--output", f"json={path}") == 0
    (summary,) = json.loads(path.read_text())["variants"][0]["summaries"]
    (pair,) = summary["carried"]
    assert (pair["src"], pair["dst"], pair["transfers"]) == ("a", "b", 12)
    assert pair["cost"] == summary["cost"] == pytest.approx(100 * pair["bytes"] / 1e9)
    output = capsys.readouterr().out
    assert "cost ┃" in output
    assert f"{summary['cost']:,.2f}" in output
    assert run(str(trace), "--output", f"json={path}") == 0
    assert json.loads(path.read_text())["variants"][0]["summaries"][0]["cost"] is None
    assert "cost ┃" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lmetrik"], "did you mean lmetric"),
        (["--dispatch", "closed"], "has no sessions"),
        (["--speedup", "0"], "speedup: 0.0 is not a number from 1e-06 to 1e+06"),
        (["--speedup", "1e-320"], "speedup: 1e-320 is not a number from 1e-06 to 1e+06"),
        (["--speedup", "nan"], "speedup: nan is not a number from 1e-06 to 1e+06"),
        (["--slo-ttft", "nan"], "ttft_s: nan"),
        (["--sweep", "workers[9].replicas=1"], "no such place"),
        (["--sweep", "router.overlap_score_weight=-1"], "overlap_score_weight"),
        (["--sweep", "replicas"], "is not key=value"),
        (["--sweep", ".=1"], ".: is not the key of a value"),
        (["--sweep", "workers[0.replicas=1"], "workers[0.replicas: is not the key of a value"),
        (["--sweep", "workers[²].replicas=1"], "is not the key of a value"),
        (["--sweep", "router.router_mode=2026-13-01"], "is not a list of values in YAML"),
        (["--sweep", "models=[{"], "sweep: '[{' is not a list of values in YAML"),
        (["--sweep", "workers[0].replicas=1", "--sweep", "workers[0].replicas=2"], "is given twice"),
        (["--policy", "kvrouter:overlap_score_weight"], "'overlap_score_weight' is not setting=value"),
        (["--policy", "kvrouter:router_mode=kv,router_mode=random"], "router_mode is given twice"),
        (["--policy", "dynamo:temperature=1,temperature=2"], "policy: dynamo: temperature is given twice"),
        (["--output", "json=no/such/folder/out.json"], "is no folder"),
        (["--report", "no/such/folder/out.html"], "is no folder"),
        (["--timing", "timing.yaml"], "prefill_base"),
        (["--events", "events.yaml"], "no worker of the fleet"),
        (
            ["--fleet", "small.yaml"],
            "trace.jsonl:1: request 0: 600 tokens and 4 more; the smallest engine",
        ),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    trace: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(trace.parent)
    Path("timing.yaml").write_text("prefill_base: -1\n")
    Path("events.yaml").write_text("events: [{at_s: 1, what: die, group: nobody}]\n")
    Path("small.yaml").write_text(
        "version: 1\nmodels: [{name: m}]\nworkers: [{name: w, engine: {total_kv_blocks: 8}}]\n"
    )
    files = set(Path().iterdir())
    assert run(str(trace), *arguments) == 2
    assert message in capsys.readouterr().err
    assert set(Path().iterdir()) == files


def test_report_page_is_written_beside_the_json_and_one_seed_repeats_it(trace: Path, tmp_path: Path) -> None:
    written = []
    for name in ("a.html", "b.html"):
        path, figures = tmp_path / name, tmp_path / "out.json"
        arguments = ("--compare", "kvrouter,random", "--report", str(path), "--output", f"json={figures}")
        assert run(str(trace), *arguments) == 0
        written.append(path.read_bytes())
    assert written[0] == written[1]
    page = written[0].decode()
    report = json.loads(figures.read_text())
    for variant in report["variants"]:
        assert f"{variant['summaries'][0]['ttft_ms']['mean']:,.0f} ms" in page
        quantiles = variant["summaries"][0]["ttft_ms"]["quantiles"]
        assert len(quantiles) == 101
        assert quantiles == sorted(quantiles)
        assert quantiles[90] == variant["summaries"][0]["ttft_ms"]["p90"]
    assert "Interrupted" not in page


def test_trace_name_may_be_invalid_utf_8(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figures, page = (
        tmp_path / os.fsdecode(b"caf\xe9.jsonl"),
        tmp_path / "out.json",
        tmp_path / "out.html",
    )
    trace.rename(path)
    assert run(str(path), "--output", f"json={figures}", "--report", str(page)) == 0
    named = str(tmp_path / r"caf\xe9.jsonl")
    assert json.loads(figures.read_text())["trace"] == named
    assert named in page.read_text()
    assert r"caf\xe9.jsonl: Mooncake" in capsys.readouterr().out


def test_interrupted_replay_writes_the_completed_variants(
    trace: Path, tmp_path: Path, make_fail: MakeFail, capsys: pytest.CaptureFixture[str]
) -> None:
    make_fail(SlotLoads, "reported", KeyboardInterrupt())
    path, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ("--compare", "random,kvrouter", "--output", f"json={path}", "--report", str(page))
    assert run(str(trace), *arguments) == 130
    report = json.loads(path.read_text())
    assert report["is_whole"] is False
    assert [variant["name"] for variant in report["variants"]] == ["random"]
    assert "interrupted" in capsys.readouterr().out
    assert "Interrupted" in page.read_text()


@pytest.mark.parametrize(
    ("decisions", "known"),
    [(5, [["kvrouter", [0]]]), (17, [["kvrouter", [0]]]), (41, [["kvrouter", [0, 1, 2]], ["random", [0]]])],
)
def test_interrupted_seed_is_left_out_where_a_whole_one_exists(
    trace: Path, tmp_path: Path, decisions: int, known: list[object], make_fail: MakeFail
) -> None:
    make_fail(Simulation, "draw", KeyboardInterrupt(), at_call=decisions)  # 12 requests a replay
    path = tmp_path / "out.json"
    assert run(str(trace), "--compare", "kvrouter,random", "--seeds", "3", "--output", f"json={path}") == 130
    variants = json.loads(path.read_text())["variants"]
    assert [[variant["name"], variant["seeds"]] for variant in variants] == known
    assert all(each["requests"] == 12 for each in variants[0]["summaries"][: decisions // 12])


def test_interrupt_between_two_replays_keeps_the_finished_ones(
    trace: Path, tmp_path: Path, make_fail: MakeFail
) -> None:
    make_fail(replay_run, "summarize", KeyboardInterrupt(), at_call=3)
    path = tmp_path / "out.json"
    assert run(str(trace), "--compare", "kvrouter,random", "--seeds", "2", "--output", f"json={path}") == 130
    report = json.loads(path.read_text())
    assert report["is_whole"] is False
    assert [(variant["name"], variant["seeds"]) for variant in report["variants"]] == [
        ("kvrouter", [0, 1]),
        ("random", [0]),
    ]


def test_errors_are_counted_over_all_seeds(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.yaml"
    events.write_text("events: [{at_s: 0.505, what: die, worker: 1}, {at_s: 0.505, what: die, worker: 2}]")
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "version: 1\nmodels: [{name: m}]\nrouter: {retries_max: 0}\nworkers: [{name: w, replicas: 4}]\n"
    )
    out = tmp_path / "out.json"
    arguments = (
        "--fleet",
        str(fleet),
        "--events",
        str(events),
        "--policy",
        "random",
        "--output",
        f"json={out}",
    )
    assert run(str(trace), *arguments, "--seeds", "4") == 0
    summaries = json.loads(out.read_text())["variants"][0]["summaries"]
    failed = [sum(each["errors"].values()) for each in summaries]
    assert len(set(failed)) > 1
    assert f"random: errors: {sum(failed) / 4:.1f} ± " in capsys.readouterr().out


def recorded(folder: Path) -> Path:
    """A recording of two workers, one of which dies between two requests."""
    both = [
        {"worker": name, "model": "m", "role": "both", "block_size": 4, "context_length": 99, "kv_blocks": 64}
        for name in ("71", "72")
    ]
    head = {
        "kind": "header", "schema": "kvrouter.recording.v1", "version": "1", "recording": "a", "part": 1,
        "started_s": 9.0, "salt": "aa",
    }  # fmt: skip
    request = {
        "kind": "request", "model": "m", "input_tokens": 3, "output_tokens": 5, "max_tokens": 9,
        "block_size": 4, "blocks": "", "status": "finished", "ended_s": 1.0,
    }  # fmt: skip
    lines = [
        head,
        {"kind": "fleet", "at_s": 0.0, "change": "all", "workers": both},
        request | {"at_s": 1.0},
        {"kind": "fleet", "at_s": 3.0, "change": "left", "workers": both[:1]},
        request | {"at_s": 4.0},
    ]
    folder.mkdir()
    path = folder / "recording-20260101T000000Z-0000000a-000001.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_recording_is_replayed_over_its_own_fleet_and_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "recording")
    fleet, events, figures = (tmp_path / name for name in ("fleet.yaml", "events.yaml", "out.json"))
    page = tmp_path / "out.html"
    arguments = ("--write-fleet", str(fleet), "--write-events", str(events), "--output", f"json={figures}")
    assert run(str(path), *arguments, "--report", str(page)) == 0
    notes = [
        "the fleet is the recorded one, as mock engines: 2 workers",
        "no --timing: engines have the default timing of mock engines, which says nothing of yours",
        "1 recorded change of the fleet applied",
    ]
    shown = capsys.readouterr().out
    report = json.loads(figures.read_text())
    assert report["notes"] == notes
    assert all(note in shown and note in page.read_text() for note in notes)
    assert events.read_text() == f"events:\n- {{at_s: 2.0, what: die, worker: 1}}  # worker 71, {path}:4\n"
    written = json.loads(figures.read_text())["variants"][0]["summaries"]
    for more in (("--events", str(events)), ("--events", "recorded"), ()):
        assert run(str(path), "--fleet", str(fleet), "--output", f"json={figures}", *more) == 0
        assert json.loads(figures.read_text())["variants"][0]["summaries"] == written


def test_changes_recorded_of_another_fleet_are_not_applied_with_a_note(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "recording")
    other = tmp_path / "other.yaml"
    other.write_text("version: 1\nmodels: [{name: m, block_size: 4}]\nworkers: [{name: w, replicas: 3}]\n")
    assert run(str(path), "--fleet", str(other)) == 0
    assert "1 recorded change of the fleet not applied: it has 3 workers like" in capsys.readouterr().out
    assert run(str(path), "--events", "none") == 0
    assert "1 recorded change of the fleet not applied: --events says what happens" in capsys.readouterr().out
    refused = {
        (
            str(path),
            "--fleet",
            str(other),
            "--events",
            "recorded",
        ): f"cannot happen to this fleet: .*{path}:2",
        (str(path), "--fleet", str(other), "--write-events", "e"): "nothing to write: 1 recorded change",
        (str(path), "--fleet", str(other), "--write-fleet", "f"): "write-fleet: only a recording",
        (str(trace), "--events", "recorded"): "only a recording has recorded changes",
        (str(trace), "--write-events", "e"): "nothing to write: the trace is no recording",
        (str(trace), "--write-fleet", "f"): "write-fleet: only a recording",
    }
    swept = ("--sweep", "workers[0].replicas=3", "--write-fleet", "f", "--write-events", "e")
    refused[str(path), *swept] = "nothing to write: 1 recorded change"
    monkeypatch.chdir(tmp_path)
    files = set(tmp_path.iterdir())
    for arguments, message in refused.items():
        assert run(*arguments) == 2
        assert set(tmp_path.iterdir()) == files
        assert re.search(message, capsys.readouterr().err)


def test_answers_that_a_trace_lacks_are_counted_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sessions.jsonl"
    without = {key: value for key, value in turn(1.0).items() if key != "out"}
    file.write_bytes(lines(session(turn(0.0), without, {**turn(2.0), "out": 0})))
    assert run(str(file)) == 0
    assert f"{file}: 2 of 3 requests have no answer, or one of 0 tokens: it is" in capsys.readouterr().err
    file.write_bytes(lines(session(turn(0.0))))
    assert run(str(file)) == 0
    assert capsys.readouterr().err == ""
