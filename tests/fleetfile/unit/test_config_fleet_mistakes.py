"""A fleet file with many mistakes: all are reported at once, each on its line, and none that only follows."""

import copy
import re
from collections.abc import Iterable
from contextlib import redirect_stderr
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.cli import main
from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_checks import default_fleet_path, examine_fleet, load_fleet
from kvrouter.settings.problems import parse_document

MISTAKEN = """\
version: 1
models:
  - {name: m, block_size: 0}
  - {name: n, tokeniser: mock}
workers:
  - {name: a, model: x, role: both}
  - {name: b, model: m, role: prefil}
  - {name: a, model: m, replicas: -1, domains: {room: r1}}
  - {name: d, model: m, role: prefill, taints: [dynamo.topology/zone=a]}
  - {name: e, model: n, engine: {kind: vlm, url: "http://a:1"}}
  - {model: n}
topology: {levels: [zone, zone]}
kv_transfer: {domain: region, enforcement: preferred}
speedup: fast
frontend: {http_port: 99999}
routr: {}
"""
FOUND = [
    "f:3: models[0].block_size",
    "f:4: models[1].tokeniser",
    "f:6: workers[0].model",
    "f:7: workers[1].role",
    "f:8: workers[2].replicas",
    "f:8: workers[2].name",
    "f:8: workers[2].domains.room",
    "f:9: workers[3].taints[0]",
    "f:10: workers[4].engine.kind",
    "f:11: workers[5].name",
    "f:12: topology.levels[1]",
    "f:13: kv_transfer.domain",
    "f:13: kv_transfer.preferred_weight",
    "f:14: speedup",
    "f:15: frontend.http_port",
    "f:16: routr",
]


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load_fleet(parse_document(MISTAKEN, "f"))
    assert _places(raised.value.message) == FOUND


def _places(message: str) -> list[str]:
    return [": ".join(line.split(": ")[:2]) for line in message.splitlines()]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("version: 2\n", ["f:1: version", "f:1: models", "f:1: workers"]),
        ("version: 1\nmodels: [{name: m}]\nworkers: 7\n", ["f:3: workers"]),
        (
            "version: 1\nmodels: [{name: 7}]\nworkers: [{name: a, model: m}, {name: a}]\n",
            ["f:2: models[0].name", "f:3: workers[1].name"],
        ),
        (
            "version: 1\nmodels: [{name: m}]\nworkers: [{name: a, role: prefill}, {name: b, role: decod}]\n",
            ["f:3: workers[1].role"],
        ),
        (
            "version: 1\nmodels: [{name: m}]\nworkers: [{name: a, domains: {zone: z}}]\n"
            "topology: {levels: zone}\n",
            ["f:4: topology.levels"],
        ),
        ("version: 1\nmodels: [m]\nworkers: [{name: a, model: m}]\n", ["f:2: models[0]"]),
    ],
)
def test_consequences_of_a_mistake_are_not_reported(text: str, places: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_fleet(parse_document(text, "f"))
    assert _places(raised.value.message) == places


LINK = {"latency_s": 1, "bandwidth_bytes_per_s": 1}
GOOD: dict[str, Any] = {
    "version": 1,
    "models": [{"name": "a"}, {"name": "b"}],
    "workers": [
        {"name": "p", "model": "a", "role": "prefill", "domains": {"zone": "z"}},
        {"name": "d", "model": "a", "role": "decode", "domains": {"zone": "z"}},
        {"name": "x", "model": "b"},
    ],
    "topology": {
        "levels": ["zone", "rack"],
        "links": {"within": {"zone": LINK}, "pairs": [{"level": "zone", "between": ["z", "y"], **LINK}]},
    },
    "kv_transfer": {"domain": "zone"},
    "router": {},
    "frontend": {},
    "planes": {},
    "log": {},
}
MISTAKES: list[tuple[str, object]] = [
    ("version", 2),
    ("models[0].block_size", 0),
    ("models[1].tokeniser", "x"),
    ("models[1].tokenizer", "./no-folder"),
    ("workers[2].model", "zz"),
    ("workers[0].role", "pre"),
    ("workers[1].name", "p"),
    ("workers[2].domains.room", "r"),
    ("workers[2].taints[0]", "dynamo.topology/x=1"),
    ("workers[2].engine.kind", "vlm"),
    ("workers[2].topology_env.DYN_TOPOLOGY_ENABLED", "maybe"),
    ("topology.links.within.zone.bandwidth_bytes_per_s", 0),
    ("topology.links.pairs[0].level", "room"),
    ("kv_transfer.enforcement", "nope"),
    ("kv_transfer.domain", "room"),
    ("router.router_mode", "direct"),
    ("router.retries_max", 99),
    ("router.router_queue_threshold", 1.0),
    ("router.router_queue_policy", "wspt"),
    ("frontend.http_port", -1),
    ("frontend.write_low_water_bytes", 70000),
    ("planes.namespace", "a b"),
    ("log.log_level", "x"),
    ("routr", {}),
    ("speedup", "fast"),
]


def mistaken(chosen: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Return the good file with these mistakes."""
    file = copy.deepcopy(GOOD)
    for place, value in chosen:
        parts = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", place)]
        around: Any = file
        for part, following in pairwise(parts):
            if isinstance(around, dict) and part not in around:
                around[part] = [] if isinstance(following, int) else {}
            around = around[part]
        if isinstance(around, list) and len(around) == parts[-1]:
            around.append(value)
        else:
            around[parts[-1]] = value
    return file


@given(st.lists(st.sampled_from(MISTAKES), min_size=2, max_size=9, unique_by=lambda each: each[0]))
@example(MISTAKES[:9])
@example(MISTAKES[9:18])
@example(MISTAKES[16:])
def test_any_combination_of_mistakes_is_reported_in_full(chosen: list[tuple[str, object]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "f.yaml"
        path.write_text(yaml.safe_dump(mistaken(chosen)))
        with redirect_stderr(StringIO()) as said:
            assert main(["fleet", "check", str(path)]) == 2
    places = sorted(line.split(": ")[2] for line in said.getvalue().splitlines())
    assert places == sorted(place for place, _ in chosen)


def test_likely_unintended_setting_of_the_file_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"router": {"admission_queue_max": 5}}))
    assert main(["fleet", "check", str(path)]) == 0
    assert "warning: router.admission_queue_max has no effect" in capsys.readouterr().err


@given(st.data())
def test_one_mistake_in_a_good_file_is_reported_alone(data: st.DataObject) -> None:
    text = default_fleet_path().read_text("utf-8")
    lines = text.splitlines()
    values = [at for at, line in enumerate(lines) if ": " in line and "{" not in line and "- " not in line]
    at = data.draw(st.sampled_from(values))
    key, _, _ = lines[at].partition(": ")
    lines[at] = f"{key}: [[]]"
    document = parse_document("\n".join(lines), "f")
    examined = examine_fleet(document)
    assert [document.line_of(problem.path) for problem in examined.problems] == [at + 1]
