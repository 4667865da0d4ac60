"""The Helm chart, rendered by Helm itself in this process, as for a cluster that nobody asked."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

Manifest = dict[str, Any]

SHAPES: dict[str, dict[str, object]] = {
    "default": {},
    "every switch off": {
        "replicas": 1,
        "admission": {"enabled": False},
        "rbac": {"create": False, "nodes": False, "aggregate": False},
        "serviceAccount": {"create": False, "name": "theirs"},
        "metrics": {"service": False},
        "podDisruptionBudget": False,
        "cleanUp": False,
    },
    "one namespace": {"watchNamespace": "fleets", "rbac": {"nodes": False}},
    "cert-manager": {
        "certificate": {"from": "certManager", "issuerRef": {"kind": "ClusterIssuer", "name": "corp"}},
        "admission": {"bindingWebhook": True},
    },
    "cert-manager signs for itself": {"certificate": {"from": "certManager"}},
    "a certificate that is there": {
        "certificate": {"from": "existing", "secretName": "tls", "caBundle": "Q0E="},
        "admission": {"bindingWebhook": "true"},
    },
    "nats of its own": {
        "nats": {
            "enabled": True,
            "jetstream": {"persistent": True, "size": "512Mi", "storageClassName": "x"},
        },
        "fleets": {"discovery": "nats", "eventPlane": "jetstream"},
    },
    "nats elsewhere": {
        "fleets": {"natsServer": "tls://nats.corp:4222,tls://nats-2.corp:4222", "requestPlane": "nats"}
    },
    "everything of pods": {
        "image": {"repository": "corp:5000/kvrouter", "digest": f"sha256:{'a' * 64}", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "corp"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "important",
        "podLabels": {"team": "serving"},
        "podAnnotations": {"corp/mesh": "off"},
        "serviceAccount": {"annotations": {"corp/role": "x"}},
        "extraArgs": ["--host=::"],
        "nats": {"enabled": True},
        "networkPolicies": {"enabled": True, "apiServerPorts": [16443]},
        "fleets": {"planeToken": {"secretName": "plane", "key": "secret"}},
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            **dict.fromkeys(("frontendMonitor", "engineMonitor", "alerts", "dashboards"), True),
        },
        "admission": {"namespaceSelector": {"matchLabels": {"kvrouter": "yes"}}},
    },
}


@cache
def shape(name: str) -> list[Manifest]:
    return rendered(SHAPES[name])


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = of_kind(manifests, kind, name)
    return found


def arguments(manifests: list[Manifest]) -> dict[str, str]:
    container = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["kvrouter", "operator", "run"]
    pairs = [argument.partition("=") for argument in container["args"]]
    return {flag: value for flag, _, value in pairs}


CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvrouter"
NOTES = "templates/NOTES.txt"
OF_ROLES = frozenset({"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})
FILLED = frozenset({"Lease", "Secret"})
"""What the operator may fill, and not make."""


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
