"""What an API server refuses of a deployment's objects: mistakes in a pod template, and a policy engine."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

DENIED = "engines come from the company's registry alone"
MISTAKES: dict[str, tuple[Mapping[str, Any], str]] = {
    "a quantity": ({"resources": {"limits": {"cpu": "lots"}}}, "quantities must match"),
    "two ports of one name": (
        {"ports": [{"name": "a", "containerPort": 1}, {"name": "a", "containerPort": 2}]},
        "ports[1].name: Duplicate value",
    ),
    "a variable's name": ({"env": [{"name": "A=B", "value": "1"}]}, "env[0].name: Invalid value"),
    "a mount without a volume": (
        {"volumeMounts": [{"name": "models", "mountPath": "/models"}]},
        'volumeMounts[0].name: Not found: "models"',
    ),
    "a probe that asks nothing": ({"livenessProbe": {"periodSeconds": 1}}, "must specify a handler type"),
    "a field that is none": ({"imagePulPolicy": "Always"}, "imagePulPolicy: field not declared in schema"),
}


def with_main(spec: Mapping[str, Any], mistake: Mapping[str, Any]) -> dict[str, Any]:
    """The deployment with this in the container of its decode workers."""
    found = deepcopy(dict(spec))
    found["spec"]["components"][2]["podTemplate"]["spec"]["containers"][0].update(mistake)
    return found


def engine_policy(namespace: str) -> list[dict[str, Any]]:
    """A policy engine's rule on this namespace, and its binding."""
    judged = "object.spec.template.spec.containers.all(c, !c.image.contains('denied'))"
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return denying(f"engines-{namespace}", "apps", "v1", "deployments", judged, **here)


def denying(
    name: str, group: str, version: str, resource: str, expression: str, **where: object
) -> list[dict[str, Any]]:
    """A policy that lets pass what ``expression`` holds for, and its binding."""
    rule = {
        "apiGroups": [group],
        "apiVersions": [version],
        "operations": ["CREATE", "UPDATE"],
        "resources": [resource],
    }
    policy = {
        "matchConstraints": {"resourceRules": [rule], **where},
        "validations": [{"expression": expression, "message": DENIED}],
    }
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": where}
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        for kind, spec in (
            ("ValidatingAdmissionPolicy", policy),
            ("ValidatingAdmissionPolicyBinding", binding),
        )
    ]
