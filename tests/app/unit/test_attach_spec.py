"""Engines of a fleet file as processes: ``kvrouter worker vllm --fleet`` and its like."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvrouter.app.attach.spec import file_engines, without_credentials
from kvrouter.cli import main
from kvrouter.cli.up.multi_process import ENGINE_WAIT_S, worker_commands
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import Role
from kvrouter.engines.attach import AttachSpec
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import read_document
from kvrouter.settings.tree import Settings

FILE = """\
version: 1
models:
  - {{name: mock}}
  - {{name: org/tiny, tokenizer: '{folder}', block_size: 32, context_length: 1024}}
  - {{name: bare}}
topology: {{levels: [zone, rack]}}
planes: {{namespace: ours}}
kv_transfer: {{domain: zone, enforcement: preferred, preferred_weight: 0.5}}
workers:
  - {{name: m, model: mock, replicas: 2}}
  - name: p
    model: org/tiny
    role: prefill
    domains: {{rack: r1, zone: a}}
    taints: [gpu, new]
    engine:
      kind: vllm
      url: http://p:8000
      kv_events_endpoint: tcp://p:5557
      kv_events_replay_endpoint: tcp://p:5657
  - {{name: d, model: org/tiny, role: decode, domains: {{zone: a}}, engine: {{kind: vllm, urls: ["http://d:8", "http://e:8"]}}}}
  - name: q
    model: bare
    topology_env: {{DYN_TOPOLOGY_ENABLED: "true"}}
    engine: {{kind: sglang, url: "https://q", kv_events: false}}
"""  # noqa: E501 - a line of a fleet file may be as long


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FILE.format(folder=tmp_path))
    return path


@dataclass
class Run:
    """What a worker process was asked to be."""

    spec: AttachSpec
    settings: Settings
    environ: Mapping[str, str]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    runs: list[Run] = []

    def serve(
        settings: Settings, spec: AttachSpec, environ: Mapping[str, str], *, drain_limit_s: float
    ) -> int:
        assert drain_limit_s > 0
        runs.append(Run(spec, settings, environ))
        return 0

    monkeypatch.setattr("kvrouter.cli.worker.engine_worker.serve_engine_worker", serve)
    monkeypatch.setenv("KVROUTER_ENGINE_API_KEY", "k")
    return runs


def test_worker_processes_are_those_the_fleet_file_describes(path: Path, runs: list[Run]) -> None:
    fleet = load_fleet(read_document(path)).fleet
    commands = worker_commands(fleet, path)
    assert [command.name for command in commands] == [
        f"worker {name}" for name in ("m/0", "m/1", "p/0", "d/0", "d/1", "q/0")
    ]
    assert [command.arguments[1] for command in commands] == ["mock"] * 2 + ["vllm"] * 3 + ["sglang"]
    for command in commands[2:]:
        assert main(command.arguments) == 0
    assert [run.spec for run in runs] == [
        replace(engine.with_key({"KVROUTER_ENGINE_API_KEY": "k"}), wait_s=float(ENGINE_WAIT_S))
        for engine in file_engines(fleet)
    ]
    p, d0, d1, q = (run.spec for run in runs)
    assert (p.worker_id, p.url, p.role, p.api_key) == (3, "http://p:8000", Role.PREFILL, "k")
    assert (p.kv_events, p.kv_events_replay) == ("tcp://p:5557", "tcp://p:5657")
    assert (p.block_size, p.context_length, p.tokenizer) == (32, 1024, str(path.parent))
    assert p.runtime_config.topology_levels == ("zone", "rack")
    assert [each.url for each in (d0, d1)] == ["http://d:8", "http://e:8"]
    assert (q.publishes_kv_events, q.block_size, q.tokenizer) == (False, None, None)
    assert {run.settings.planes.namespace for run in runs} == {"ours"}
    assert [run.environ.get("DYN_TOPOLOGY_ENABLED") for run in runs] == [None, None, None, "true"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vllm"], "--group: must be one of p, d"),
        (["vllm", "--group", "q"], "--group: must be one of p, d, not 'q'"),
        (["vllm", "--group", "d", "--index", "2"], "--index: group 'd' has engines 0 to 1, not 2"),
        (["trtllm"], "--fleet: the file has no engines of kind 'trtllm'"),
        (["vllm", "--group", "d", "--url", "http://d:8", "--domain", "zone=b"],
         "--url, --domain: the fleet file says so already"),
        (["mock", "--group", "p"],
         "--group: 'p' has no mock engines: its workers are run by kvrouter worker vllm --fleet"),
    ],
)  # fmt: skip
def test_group_index_or_kind_missing_from_the_fleet_file_is_refused(
    arguments: list[str], says: str, path: Path, runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *flags = arguments
    assert main(["worker", kind, "--fleet", str(path), *flags]) == 2
    assert f"kvrouter: {says}" in capsys.readouterr().err
    assert runs == []


def test_a_group_without_a_file_is_refused(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "vllm", "--url", "http://h:1", "--group", "p"]) == 2
    assert "--group and --index are about the engines of --fleet" in capsys.readouterr().err
    assert main(["worker", "vllm"]) == 2
    assert "--url: is required, unless --fleet names a file" in capsys.readouterr().err
    assert runs == []


def test_worker_id_may_be_given_beside_a_fleet_file(path: Path, runs: list[Run]) -> None:
    assert main(["worker", "sglang", "--fleet", str(path), "--worker-id", "77"]) == 0
    assert [run.spec.worker_id for run in runs] == [77]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://someone:secret@engine:8443/root?key=secret#part", "https://engine:8443/root"),
        ("http://user@[::1]:8000/", "http://[::1]:8000/"),
    ],
)
def test_published_engine_url_has_no_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_place_of_an_engine_and_of_its_fields_is_named_once() -> None:
    spec = AttachSpec(
        kind="vllm",
        url="http://h:1",
        worker_id=WorkerId(1),
        written_at="--url",
        fields_at={"block_size": "--url", "role": "roles"},
    )
    assert spec.mistake("no", param="block_size").message == "--url: http://h:1: no"
    assert spec.mistake("no", param="role").message == "--url: http://h:1: roles: no"
