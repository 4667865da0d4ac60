"""The example deployments: each is admitted without a warning, and planned without one."""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvrouter.kube.objects import key_of
from kvrouter.operator.admission.validate import validate
from kvrouter.operator.api.deployment import KIND, read_deployment
from kvrouter.operator.api.grove import read_topology
from kvrouter.operator.cluster_info import ClusterInfo, Grove, by_name
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.plan import Plan, plan
from tests.testing.helm_chart import Manifest, of_kind

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
GOLDEN = Path(__file__).parents[1] / "data" / "manifests" / "examples.txt"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))
DEFAULTS = PlanDefaults(image="example.com/kvrouter:1")

ENFORCED = {
    "one-zone.yaml": [None],
    "autoscaled.yaml": [None],
    "two-zones-required.yaml": ["required"],
    "two-zones-fallback.yaml": ["fallback"],
    "two-zones-preferred.yaml": ["preferred"],
    "without-grove.yaml": ["required"],
    "grove.yaml": ["required"],
    "vllm.yaml": ["required"],
    "migration/before.yaml": [None, None],
    "migration/after.yaml": ["required"],
}


@cache
def documents(file: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def facts_of(file: str) -> ClusterInfo:
    """A cluster that holds the file's own topology, if it has one."""
    found = [read_topology(each) for each in documents(file) if each["kind"] != KIND]
    topologies = by_name(topology for topology in found if topology is not None)
    return ClusterInfo(grove=Grove.PRESENT if topologies else Grove.ABSENT, topologies=topologies)


def planned(file: str) -> list[Plan]:
    found = []
    for document in of_kind(documents(file), KIND):
        deployment = read_deployment(document).deployment
        assert deployment is not None
        found.append(plan(deployment, facts_of(file), DEFAULTS))
    return found


def test_the_example_list_is_complete() -> None:
    assert set(FILES) == set(ENFORCED)
    reported = (FOLDER / "README.md").read_text()
    assert all(f"({file})" in reported or file.startswith("migration/") for file in FILES)


@pytest.mark.parametrize("file", FILES)
def test_examples_are_admitted_without_a_warning(file: str) -> None:
    for document in of_kind(documents(file), KIND):
        verdict = validate(document, None, facts_of(file), DEFAULTS)
        assert (verdict.problems, verdict.warnings) == ((), ())


@pytest.mark.parametrize("file", FILES)
def test_examples_are_planned_with_their_policy_and_no_warning(file: str) -> None:
    plans = planned(file)
    assert [(each.problems, each.warnings) for each in plans] == [((), ())] * len(plans)
    assert [each.policy and each.policy.enforcement.value for each in plans] == ENFORCED[file]


@pytest.mark.parametrize("file", FILES)
def test_planned_manifests_fit_the_kubernetes_schemas(file: str) -> None:
    manifests = [dict(manifest) for each in planned(file) for manifest in each.manifests]
    assert {"Deployment", "Service"} <= {str(manifest["kind"]) for manifest in manifests}
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.30", strict=True)


@pytest.mark.parametrize("file", FILES)
def test_topology_spread_selectors_match_their_pods_labels(file: str) -> None:
    for manifest in of_kind(
        [dict(each) for whole in planned(file) for each in whole.manifests], "Deployment"
    ):
        template = manifest["spec"]["template"]
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_migration_example_keeps_the_number_of_pods() -> None:
    def replicas(file: str, kind: str) -> int:
        return sum(
            component["replicas"]
            for document in documents(file)
            for component in document["spec"]["components"]
            if component["type"] == kind
        )

    for kind in ("frontend", "prefill", "decode"):
        assert replicas("migration/before.yaml", kind) == replicas("migration/after.yaml", kind)


def test_plans_of_the_examples_match_the_golden_file() -> None:
    """KVROUTER_WRITE_GOLDEN=1 writes the file again, when a plan is meant to change: its rows name which."""
    rows = [
        f"{file} {manifest['kind']} {key_of(manifest)} {_digest(manifest)}"
        for file in FILES
        for each in planned(file)
        for manifest in each.manifests
    ]
    text = "\n".join(rows) + "\n"
    if os.environ.get("KVROUTER_WRITE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert GOLDEN.read_text(encoding="utf-8") == text


def _digest(manifest: Mapping[str, object]) -> str:
    """Return a hash of a manifest with its keys in their order, which a server-side apply keeps."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()[:16]
