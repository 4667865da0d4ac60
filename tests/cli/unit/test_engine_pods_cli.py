"""``kvrouter up --engine-pods``: what it refuses at once, and the example manifests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrouter.cli import main
from kvrouter.cli.worker import engine_pods
from kvrouter.core.workers import EnginePod, PodPort
from kvrouter.fleetfile.engine_pods import engine_of

EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes-engines"


def reported(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "up") -> str:
    assert main([*command.split(), *arguments]) == 2
    return capsys.readouterr().err


def test_engine_pods_outside_of_a_pod_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert "--engine-pods: KUBERNETES_SERVICE_HOST is not set, so this is no pod: run kvrouter in a pod" in (
        reported(capsys, "--engine-pods", "--http-port", "0")
    )
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVROUTER_KUBERNETES_ACCOUNT", str(tmp_path))
    assert f"--engine-pods: {tmp_path}/namespace: No such file" in reported(capsys, "--engine-pods", "team=a")
    missing = reported(capsys, command="worker pods")
    assert f"kvrouter worker pods: {tmp_path}/namespace: No such file" in missing


@pytest.mark.parametrize(
    "arguments",
    [("--fleet", "fleet.yaml"), ("--replicas", "2"), ("--nats",)],
)
def test_engine_pods_exclude_fleet_file_replicas_and_nats(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert "--engine-pods: not with --fleet, --replicas or --nats" in reported(
        capsys, "--engine-pods", "team=a", *arguments
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine-namespace", "other"), "--engine-namespace: only with --engine-pods"),
        (("--model-path", "tiny=/models/tiny"), "--model-path: only with --url or --engine-pods"),
    ],
)
def test_engine_pod_options_without_engine_pods_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in reported(capsys, *arguments)


def test_a_mistake_in_the_policy_names_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "zone")
    monkeypatch.setenv("DYN_KV_TRANSFER_ENFORCEMENT", "hard")
    assert "DYN_KV_TRANSFER_ENFORCEMENT: 'hard' is none of" in reported(capsys, "--engine-pods")


@pytest.fixture
def _in_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("namespace", "token", "ca.crt"):
        (tmp_path / name).write_text("models")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVROUTER_KUBERNETES_ACCOUNT", str(tmp_path))


@pytest.mark.usefixtures("_in_a_pod")
def test_settings_mistake_is_reported_before_pods_are_followed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def followed(*asked: object, **_: object) -> AsyncIterator[None]:
        assert not asked, "the settings were not looked at before"
        yield

    monkeypatch.setattr(engine_pods, "pods_followed", followed)
    monkeypatch.setenv("KVROUTER_DISCOVERY_DIR", str(tmp_path / "discovery"))
    nowhere = ("--discovery", "file", "--listen-host", "192.0.2.1")
    assert "choose another address with --listen-host" in reported(capsys, *nowhere, command="worker pods")


@pytest.mark.usefixtures("_in_a_pod")
def test_fixed_listen_port_is_refused_for_workers_of_many_pods(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--listen-port: must be 0: every engine's worker has a port of its own" in (
        reported(capsys, "--listen-port", "9000", command="worker pods")
    )


def examples() -> list[dict[str, Any]]:
    files = sorted(EXAMPLES.glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def test_example_manifests_describe_engines_without_mistakes() -> None:
    found = []
    for each in examples():
        template = each["spec"]["template"] if each["kind"] == "Deployment" else {"metadata": {}}
        metadata = template["metadata"]
        if "kvrouter.dev/engine" not in metadata.get("labels", {}):
            continue
        ports = [
            PodPort(port["name"], port["containerPort"], container["name"])
            for container in template["spec"]["containers"]
            for port in container["ports"]
        ]
        engine = engine_of(
            EnginePod(
                namespace="models",
                name=each["metadata"]["name"],
                uid="1",
                labels=metadata["labels"],
                annotations=metadata.get("annotations", {}),
                ip="10.0.0.7",
                ports=tuple(ports),
            )
        )
        found.append((each["metadata"]["name"], engine.group.role.value, engine.url))
    assert found == [
        ("qwen-prefill", "prefill", "http://10.0.0.7:30000"),
        ("qwen-decode", "decode", "http://10.0.0.7:30000"),
        ("llama", "both", "http://10.0.0.7:8000"),
    ]
