"""The Helm chart, rendered by Helm itself in this process, as for a cluster that nobody asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvrouter"
NOTES = "templates/NOTES.txt"
OF_ROLES = frozenset({"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})
FILLED = frozenset({"Lease", "Secret"})
"""What the operator may fill, and not make."""

Manifest = dict[str, Any]


def rendered(
    values: Mapping[str, object] | None = None, *, name: str = "kvrouter", namespace: str = "kvrouter-system"
) -> list[Manifest]:
    """Every manifest of a release, hooks included and definitions left out.

    Raises HelmValuesError for values that the schema refuses.
    """
    given = dict(values or {})
    with Chart.load(CHART) as chart:
        chart.validate_schema(given)
        texts = chart.render(given, name=name, namespace=namespace)
    documents = [
        document
        for path, text in sorted(texts.items())
        if not path.endswith(NOTES)
        for document in yaml.safe_load_all(text)
    ]
    return [document for document in documents if document]


def notes(values: Mapping[str, object] | None = None, *, namespace: str = "kvrouter-system") -> str:
    """What Helm says at the end of an installation."""
    with Chart.load(CHART) as chart:
        texts = chart.render(dict(values or {}), name="kvrouter", namespace=namespace)
    return next(text for path, text in texts.items() if path.endswith(NOTES))


def of_kind(manifests: list[Manifest], kind: str, name: str = "") -> list[Manifest]:
    """Those of a kind, and of a name unless it is empty."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    return [manifest for manifest in found if not name or manifest["metadata"]["name"] == name]


def pods_of(manifests: list[Manifest]) -> list[Manifest]:
    """The specs of their pods."""
    found = [each["spec"] for each in of_kind(manifests, "Pod")]
    for kind in ("Deployment", "StatefulSet", "Job"):
        found += [each["spec"]["template"]["spec"] for each in of_kind(manifests, kind)]
    return found


def is_hook(manifest: Manifest) -> bool:
    """Whether Helm runs it at some moment, and it is no part of the release."""
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})
