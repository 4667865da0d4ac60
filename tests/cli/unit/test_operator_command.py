"""``kvrouter operator run`` where it cannot start."""

import sys
from pathlib import Path

import pytest
import yaml

from kvrouter.cli import main


def test_operator_without_its_extra_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvrouter.operator.run", raising=False)
    monkeypatch.setitem(sys.modules, "kubernetes.aio.client", None)
    monkeypatch.delitem(sys.modules, "kvrouter.kube.kubeconfig", raising=False)
    assert main(["operator", "run", "--image", "kvrouter", "--kubeconfig", "file"]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("kvrouter: the operator needs kubernetes, which is not installed")
    assert "pip install 'kvrouter[kubernetes]'" in reported


def test_operator_outside_of_a_cluster_asks_for_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["operator", "run", "--image", "kvrouter"]) == 2
    assert "no --kubeconfig is given, and this is no pod of a cluster" in capsys.readouterr().err


def test_invalid_kubeconfig_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("clusters: []\n")
    assert main(["operator", "run", "--image", "kvrouter", "--kubeconfig", str(path)]) == 2
    assert "kvrouter: --kubeconfig" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--discovery", "nats"), ("--request-plane", "nats"), ("--event-plane", "jetstream")]
)
def test_nats_plane_without_a_server_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["operator", "run", "--image", "kvrouter", flag, value]) == 2
    assert f"{flag} is NATS: say with --nats-server where that is" in capsys.readouterr().err


def test_clean_up_outside_of_a_cluster_asks_for_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["operator", "clean-up"]) == 2
    assert "no --kubeconfig is given, and this is no pod of a cluster" in capsys.readouterr().err


def test_admission_without_a_certificate_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "contexts": [context],
        "current-context": "c",
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    ports = ("--host", "127.0.0.1", "--http-port", "0", "--admission-port", "0")
    door = ("--kubeconfig", str(path), "--certificate", str(tmp_path), *ports)
    assert main(["operator", "run", "--image", "kvrouter", *door]) == 2
    assert f"kvrouter: {tmp_path}/tls.crt" in capsys.readouterr().err
