"""What is made from the chart is fresh, and kubectl's own kustomize builds it."""

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import write_manifests
from scripts.write_manifests import ALONE, VARIANTS, main
from tests.testing.constants import SetConstants
from tests.testing.helm_chart import Manifest, of_kind

KUSTOMIZE = Path(__file__).parents[2] / "deploy" / "kustomize"
IMAGE = "ghcr.io/kvrouter/kvrouter"


def built(folder: Path) -> list[Manifest]:
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    done = subprocess.run(
        [kubectl, "kustomize", folder], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def operator_of(manifests: list[Manifest]) -> dict[str, Any]:
    (deployment,) = of_kind(manifests, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_files_generated_from_the_chart_are_fresh() -> None:
    assert main(["--check"]) == 0
    assert {path.parent.name for path in KUSTOMIZE.glob("*/kustomization.yaml")} == set(VARIANTS)


def test_a_value_without_a_comment_is_named(set_constants: SetConstants, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# -- What it is.\ntold: 1\npart:\n  silent: 2\n")
    set_constants(write_manifests, CHART=tmp_path)
    with pytest.raises(ValueError, match=r"part\.silent of values\.yaml needs a comment"):
        write_manifests.values_table()


@pytest.mark.parametrize("folder", sorted(set(VARIANTS) - set(ALONE)))
def test_each_kustomize_folder_builds_only_the_expected_objects(folder: str) -> None:
    manifests = built(KUSTOMIZE / folder)
    assert not of_kind(manifests, "CustomResourceDefinition")  # else `kubectl delete -k` deletes fleets
    assert of_kind(manifests, "Namespace", "kvrouter-system")
    assert {each["metadata"].get("namespace") for each in manifests} == {None, "kvrouter-system"}
    assert not [each for each in manifests if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    labels = [label for each in manifests for label in each["metadata"].get("labels", {})]
    assert not [label for label in labels if label.startswith("helm.sh/") or label.endswith("managed-by")]
    assert bool(of_kind(manifests, "Certificate")) == (folder == "cert-manager")
    assert bool(of_kind(manifests, "StatefulSet")) == (folder == "nats")


def test_the_webhook_on_bindings_can_be_added() -> None:
    (webhook,) = built(KUSTOMIZE / "binding-webhook")
    assert webhook["metadata"]["name"] == "kvrouter-operator-binding"


def test_an_image_override_reaches_the_operator_and_its_fleets(tmp_path: Path) -> None:
    for path in KUSTOMIZE.parent.glob("**/*.y*ml"):
        place = tmp_path / path.relative_to(KUSTOMIZE.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path.read_text())
    kustomization = tmp_path / "kustomize" / "default" / "kustomization.yaml"
    text = kustomization.read_text()
    kustomization.write_text(text.replace(f"newName: {IMAGE}", "newName: corp:5000/router"))
    container = operator_of(built(kustomization.parent))
    reported = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert container["image"] == reported["KVROUTER_IMAGE"] == "corp:5000/router:0.1.0"


def test_every_folder_names_the_same_image_as_the_chart() -> None:
    chart = yaml.safe_load((write_manifests.CHART / "Chart.yaml").read_text())
    for folder in sorted(set(VARIANTS) - set(ALONE)):
        kustomization = yaml.safe_load((KUSTOMIZE / folder / "kustomization.yaml").read_text())
        assert kustomization["images"] == [{"name": IMAGE, "newName": IMAGE, "newTag": chart["appVersion"]}]
