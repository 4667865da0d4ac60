"""A fleet file with many mistakes: all are told at once, each on its line, and none that only follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.config.document import parse_document
from kvrouter.config.fleet_checks import default_fleet_path, examine_fleet, load_fleet
from kvrouter.core.errors import ConfigError

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


def test_all_mistakes_are_told_at_once() -> None:
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
def test_what_only_follows_from_a_mistake_is_not_told(text: str, places: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_fleet(parse_document(text, "f"))
    assert _places(raised.value.message) == places


@given(st.data())
def test_one_mistake_in_a_good_file_is_told_alone(data: st.DataObject) -> None:
    text = default_fleet_path().read_text("utf-8")
    lines = text.splitlines()
    values = [at for at, line in enumerate(lines) if ": " in line and "{" not in line and "- " not in line]
    at = data.draw(st.sampled_from(values))
    key, _, _ = lines[at].partition(": ")
    lines[at] = f"{key}: [[]]"
    document = parse_document("\n".join(lines), "f")
    examined = examine_fleet(document)
    assert [document.line_of(problem.path) for problem in examined.problems] == [at + 1]
