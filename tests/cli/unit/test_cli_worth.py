"""``kvrouter worth`` as its user types it: two field reports that contradict each other, and mistakes."""

import json
import re
from pathlib import Path

import pytest

from kvrouter.cli import main
from kvrouter.cli.worth import run as worth_run
from kvrouter.sim.replay.simulation import Simulation
from tests.testing.calls import MakeFail

DIFFERENT_LINKS = """\
version: 1
models: [{name: m, block_size: 64}]
router: {router_cost: blocks}
topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0005, bandwidth_bytes_per_s: 12.5e9}}
    across: {latency_s: 0.002, bandwidth_bytes_per_s: 0.625e9, price_per_gb: 0.02}
workers:
- {name: prefill-a, role: prefill, replicas: 2, domains: {zone: a}}
- {name: decode-a, role: decode, replicas: 2, domains: {zone: a}}
- {name: prefill-b, role: prefill, replicas: 2, domains: {zone: b}}
- {name: decode-b, role: decode, replicas: 2, domains: {zone: b}}
"""
"""KV of 131,072 bytes a token takes 20 times as long to another zone as within one."""

LONG_PROMPTS = """\
generate:
  requests: 200
  rate_per_s: 1.5
  input: {mean: 3000, sigma: 0.4, max: 16000}
  output: {mean: 30}
"""

ALIKE_LINKS = """\
version: 1
models: [{name: m, block_size: 64}]
router: {router_cost: blocks}
topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0005, bandwidth_bytes_per_s: 12.5e9}}
    across: {latency_s: 0.0006, bandwidth_bytes_per_s: 12.0e9}
workers:
- {name: prefill-a, role: prefill, replicas: 3, domains: {zone: a}}
- {name: decode-a, role: decode, replicas: 1, domains: {zone: a}, engine: {max_num_seqs: 4}}
- {name: prefill-b, role: prefill, replicas: 1, domains: {zone: b}}
- {name: decode-b, role: decode, replicas: 3, domains: {zone: b}, engine: {max_num_seqs: 4}}
"""
"""Zone a computes most prompts, and has a quarter of the room to answer them in."""

BUSY = """\
generate:
  requests: 250
  rate_per_s: 14
  input: {mean: 2000, sigma: 0.5, max: 12000}
  output: {mean: 60, sigma: 0.4}
"""

ROWS = "".join(
    json.dumps({"timestamp": 100 * n, "input_length": 600, "output_length": 4, "hash_ids": [n % 3, 9]}) + "\n"
    for n in range(100)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("different.yaml").write_text(DIFFERENT_LINKS)
    Path("alike.yaml").write_text(ALIKE_LINKS)
    Path("long.yaml").write_text(LONG_PROMPTS)
    Path("busy.yaml").write_text(BUSY)
    Path("trace.jsonl").write_text(ROWS)
    return tmp_path


BY_BLOCKS = ("--mode", "kv", "--cost", "blocks", "--output", "json=out.json")


def run(*arguments: str) -> int:
    return main(["worth", *arguments])


def test_topology_aware_pairs_are_advised_where_links_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "long.yaml",
            "--fleet",
            "different.yaml",
            "--mode",
            "kv",
            "--cost",
            "blocks",
            "--output",
            "json=out.json",
        )
        == 0
    )
    report = json.loads((folder / "out.json").read_text())
    advice = report["advice"]
    assert advice["verdict"] == "switch"
    assert (advice["choice"]["enforcement"], advice["choice"]["level"]) == ("preferred", "zone")
    assert "required on zone, kv by blocks" in advice["as_good"]
    assert report["today"]["name"] == "anywhere, kv by blocks"
    assert report["today"]["figures"]["cost"] == pytest.approx(
        0.02 * report["today"]["figures"]["crossing_gb"]
    )
    by_name = {each["name"]: each["changes"] for each in report["alternatives"]}
    required = by_name["required on zone, kv by blocks"]
    ttft = required["ttft_mean_ms"]
    assert ttft["today"] > 3.5 * (ttft["today"] + ttft["change"])
    assert ttft["change"] + ttft["within_all"] < 0.0
    assert required["crossing_gb"]["change"] == pytest.approx(-report["today"]["figures"]["crossing_gb"])
    output = capsys.readouterr().out
    assert "today: anywhere, kv by blocks" in output
    assert "Switch to preferred 1 on zone, kv by blocks: mean TTFT falls by" in output


def test_no_change_is_advised_where_a_filter_strands_workers_of_equal_links(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("busy.yaml", "--fleet", "alike.yaml", *BY_BLOCKS) == 0
    report = json.loads((folder / "out.json").read_text())
    advice = report["advice"]
    assert (advice["verdict"], advice["choice"]) == ("leave it", None)
    assert "required on zone, kv by blocks" in advice["worse"]
    by_name = {each["name"]: each["changes"] for each in report["alternatives"]}
    for name in ("required on zone, kv by blocks", "fallback on zone, kv by blocks"):
        ttft, good = by_name[name]["ttft_mean_ms"], by_name[name]["good_share"]
        assert ttft["change"] - ttft["within"] > ttft["today"]
        assert good["change"] + good["within"] < 0.0
    output = capsys.readouterr().out
    assert "Leave it: nothing makes mean TTFT or goodput better" in output
    assert "no p99: it needs 100 answered requests in each of 10 parts" in output
    assert not [each for each in by_name.values() if "ttft_p99_ms" in each]
    assert "Worse than today, such as required on zone, kv by blocks: mean TTFT rises by" in output


def test_another_cost_is_advised_without_a_policy_where_links_are_equal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run("busy.yaml", "--fleet", "alike.yaml", "--mode", "kv", "--seeds", "1", "--output", "json=out.json")
        == 0
    )
    report = json.loads((folder / "out.json").read_text())
    advice = report["advice"]
    assert advice["verdict"] == "switch"
    assert (advice["choice"]["enforcement"], advice["choice"]["cost"]) == (None, "joint")
    assert "Switch to anywhere, kv by joint: mean TTFT falls by" in capsys.readouterr().out


def test_good_policy_in_place_is_kept(folder: Path) -> None:
    Path("kept.yaml").write_text(f"{DIFFERENT_LINKS}kv_transfer: {{domain: zone}}\n")
    assert run("long.yaml", "--fleet", "kept.yaml", *BY_BLOCKS) == 0
    report = json.loads((folder / "out.json").read_text())
    assert report["advice"]["verdict"] == "leave it"
    assert "anywhere, kv by blocks" in report["advice"]["worse"]
    by_name = {each["name"]: each["is_looser"] for each in report["alternatives"]}
    assert by_name["anywhere, kv by blocks"]
    assert by_name["preferred 1 on zone, kv by blocks"]


def test_same_seeds_repeat_the_bytes_and_all_modes_are_compared(folder: Path) -> None:
    for name in ("a.json", "b.json"):
        arguments = ("--fleet", "different.yaml", "--seeds", "2", "--seed", "3", "--output", f"json={name}")
        assert run("trace.jsonl", *arguments) == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    report = json.loads((folder / "a.json").read_text())
    assert len(report["alternatives"]) == 17
    assert {each["choice"]["mode"] for each in report["alternatives"]} == {"kv", "round-robin", "random"}
    assert (report["requests"], report["parts"], report["is_whole"]) == (100, 10, True)
    assert all(len(each["changes"]["ttft_mean_ms"]["parts"]) == 10 for each in report["alternatives"])


def test_seeds_that_change_nothing_are_not_replayed(folder: Path) -> None:
    arguments = ("--mode", "round-robin", "--mode", "random", "--seeds", "4", "--output", "json=out.json")
    assert run("trace.jsonl", "--fleet", "different.yaml", *arguments) == 0
    seeds = {each["name"]: each["seeds"] for each in json.loads(Path("out.json").read_text())["alternatives"]}
    assert seeds["anywhere, round-robin"] == 2
    assert seeds["anywhere, random"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace.jsonl"], "--fleet"),
        (["trace.jsonl", "--fleet", "no-links.yaml"], "topology.links: is required"),
        (["trace.jsonl", "--fleet", "no-levels.yaml"], "topology.levels: is empty"),
        (["trace.jsonl", "--fleet", "aggregated.yaml"], "none has role prefill"),
        (
            ["trace.jsonl", "--fleet", "dear.yaml"],
            "dear.yaml:8: topology.links.across.price_per_gb: must be ≥ 0",
        ),
        (["trace.jsonl", "--fleet", "different.yaml", "--rows", "99"], "it has 99 requests"),
        (["trace.jsonl", "--fleet", "different.yaml", "--threshold", "nan"], "threshold: nan %"),
        (["trace.jsonl", "--fleet", "different.yaml", "--threshold", "-1"], "threshold: -1 %"),
        (["trace.jsonl", "--fleet", "different.yaml", "--mode", "best"], "'best' is not one of"),
        (["trace.jsonl", "--fleet", "different.yaml", "--dispatch", "closed"], "has no sessions"),
        (["trace.jsonl", "--fleet", "different.yaml", "--slo-ttft", "0"], "ttft_s: 0"),
        (["trace.jsonl", "--fleet", "different.yaml", "--output", "json=no/such/out.json"], "is no folder"),
        (["nothing.jsonl", "--fleet", "different.yaml"], "nothing.jsonl"),
        (
            ["trace.jsonl", "--fleet", "different.yaml", "--events", "section.yaml"],
            "section.yaml:1: events[0].set.kv_transfer: cannot change: it is what is compared",
        ),
        (
            ["trace.jsonl", "--fleet", "different.yaml", "--events", "mode.yaml"],
            "mode.yaml:1: events[0].set.router.router_mode: cannot change: it is what is compared",
        ),
        (
            ["trace.jsonl", "--fleet", "levels.yaml", "--events", "link.yaml"],
            "link.yaml:1: events[0].between[0]: no worker has zone=r-a",
        ),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    folder: Path,
    arguments: list[str],
    message: str,
    make_fail: MakeFail,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_fail(Simulation, "run", AssertionError("it was replayed"))
    at = DIFFERENT_LINKS.index("  links:")
    Path("no-links.yaml").write_text(
        DIFFERENT_LINKS[:at] + DIFFERENT_LINKS[DIFFERENT_LINKS.index("workers:") :]
    )
    Path("no-levels.yaml").write_text("version: 1\nmodels: [{name: m}]\nworkers: [{name: w}]\n")
    Path("aggregated.yaml").write_text(
        DIFFERENT_LINKS.replace("role: prefill, ", "").replace("role: decode, ", "")
    )
    set_section = "events: [{at_s: 1, what: policy, set: {kv_transfer: {domain: zone}}}]"
    Path("section.yaml").write_text(set_section)
    Path("mode.yaml").write_text("events: [{at_s: 1, what: policy, set: {router.router_mode: random}}]")
    Path("levels.yaml").write_text(
        re.sub(r"zone: ([ab])}", r"rack: r-\1, zone: \1}", DIFFERENT_LINKS)
        .replace("levels: [zone]", "levels: [zone, rack]")
        .replace("within: {", "within: {rack: {latency_s: 0.0, bandwidth_bytes_per_s: 5.0e10}, ")
        .replace("workers:", "kv_transfer: {domain: rack}\nworkers:", 1)
    )
    Path("link.yaml").write_text(
        "events: [{at_s: 1, what: link, between: [r-a, r-a], bandwidth_factor: 0.5}]"
    )
    Path("dear.yaml").write_text(DIFFERENT_LINKS.replace("0.02}", "-1}"))
    files = set(folder.iterdir())
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert set(folder.iterdir()) == files


def test_interrupt_between_two_replays_keeps_the_finished_ones(folder: Path, make_fail: MakeFail) -> None:
    make_fail(worth_run, "rows_of", KeyboardInterrupt(), at_call=2)
    arguments = (
        "--fleet",
        "different.yaml",
        "--seeds",
        "1",
        "--mode",
        "kv",
        "--cost",
        "blocks",
        "--output",
        "json=out.json",
    )
    assert run("trace.jsonl", *arguments) == 130
    report = json.loads((folder / "out.json").read_text())
    assert report["is_whole"] is False
    assert [each["name"] for each in report["alternatives"]] == ["preferred 1 on zone, kv by blocks"]


def test_recorded_policy_does_not_replace_the_compared_choices(folder: Path) -> None:
    roles = ("prefill", "prefill", "decode", "decode")
    workers = [
        {
            "worker": str(number), "model": "m", "role": role, "block_size": 64, "context_length": 9_999,
            "domains": {"zone": zone}, "kv_blocks": 4_096,
        }
        for number, (zone, role) in enumerate((zone, role) for zone in "ab" for role in roles)
    ]  # fmt: skip
    strict = [worker | {"transfer_domain": "zone", "enforcement": "required"} for worker in workers]
    request = {
        "kind": "request", "model": "m", "input_tokens": 63, "output_tokens": 5, "max_tokens": 9,
        "block_size": 64, "blocks": "", "status": "finished", "ended_s": 1.0,
    }  # fmt: skip
    lines = [
        {
            "kind": "header", "schema": "kvrouter.recording.v1", "version": "1", "recording": "a", "part": 1,
            "started_s": 9.0, "salt": "aa",
        },
        {"kind": "fleet", "at_s": 0.0, "change": "all", "workers": workers},
        request | {"at_s": 1.0},
        {"kind": "fleet", "at_s": 1.5, "change": "changed", "workers": strict},
        *(request | {"at_s": 2.0 + number} for number in range(100)),
    ]  # fmt: skip
    path = folder / "recording-20260101T000000Z-0000000a-000001.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--fleet", "different.yaml", "--mode", "random", "--seeds", "2", "--output", "json=out.json")
    assert run(str(path), *arguments) == 0
    report = json.loads(Path("out.json").read_text())
    assert report["notes"] == ["recorded changes that this replay does not make: 1 of transfer policy"]
    assert report["today"]["figures"]["crossing_gb"] > 0.1
    of = {each["name"]: each["changes"] for each in report["alternatives"]}
    assert of["anywhere, random"]["crossing_gb"]["today"] > 0.1
    assert of["required on zone, random"]["crossing_gb"]["change"] < -0.1


@pytest.mark.parametrize(
    ("decisions", "known"),
    [
        (50, None),
        (250, []),
        (450, ["preferred 1 on zone, kv by blocks"]),
    ],  # 100 requests, two replays of each that are alike
)
def test_interrupted_worth_writes_the_known_results(
    folder: Path,
    decisions: int,
    known: list[str] | None,
    make_fail: MakeFail,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_fail(Simulation, "draw", KeyboardInterrupt(), at_call=decisions)
    arguments = ("--fleet", "different.yaml", "--cost", "blocks", "--output", "json=out.json")
    assert run("trace.jsonl", *arguments) == 130
    report = json.loads((folder / "out.json").read_text())
    assert report["is_whole"] is False
    assert (report["today"] is None) is (known is None)
    assert [each["name"] for each in report["alternatives"]] == (known or [])
    assert (report["advice"] is None) is (not known)
    output = capsys.readouterr().out
    assert ("nothing is known" in output) is (known is None)
    assert "interrupted" in output


def test_an_upgrade_halfway_costs_what_its_pairs_lose(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = (*BY_BLOCKS, "--fleet", "different.yaml")
    shares = ("50", "25/75", "50/50", "0", "60/40")
    assert run("long.yaml", *file, *(word for each in shares for word in ("--upgraded", each))) == 0
    report = json.loads((folder / "out.json").read_text())
    half, uneven, none = report["upgrades"]
    assert [each["pair_capacity"] for each in (half, uneven, none)] == [1.0, 0.5, 1.0]
    assert none["changes"]["ttft_mean_ms"]["change"] == 0.0
    assert half["changes"]["crossing_gb"]["change"] == pytest.approx(-half["changes"]["crossing_gb"]["today"])
    assert uneven["changes"]["ttft_mean_ms"]["change"] > half["changes"]["ttft_mean_ms"]["change"]
    assert report["advice"]["choice"]["enforcement"] == "preferred", "an upgrade is no choice"
    counts = [(each["prefill"], each["decode"]) for each in (half, uneven, none)]
    assert counts == [2 * (of_four(2),), (of_four(1), of_four(3)), 2 * (of_four(0),)]
    output = capsys.readouterr().out
    assert "1 of 4 prefill and 3 of 4 decode workers upgraded: 50% of the capacity of pairs is left" in output


def of_four(upgraded: int) -> dict[str, int]:
    return {"upgraded": upgraded, "workers": 4}


@pytest.mark.parametrize("given", ["much", "101", "-1/50", "50/", "1/2/3", "nan"])
def test_a_share_that_is_none_is_refused_before_any_replay(
    folder: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert run("long.yaml", *BY_BLOCKS, "--fleet", "different.yaml", "--upgraded", given) == 2
    assert f"upgraded: '{given}' is not PERCENT" in capsys.readouterr().err
