"""Labels a pod in the write that binds it: by a MutatingAdmissionPolicy, or by the patch of a webhook."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.labels.level_labels import (
    PLACES_KIND,
    PLACES_VERSION,
    POD_NAME_CHARS_MAX,
    POD_NAME_END,
    POD_NAME_END_CUT,
    LevelLabels,
    pod_labels,
)
from kvrouter.operator.labels.pods import Node, Pod

API_VERSION = "admissionregistration.k8s.io/v1"
_END = "object.metadata.name.substring(size(start))"
IS_A_WORKER = (
    "request.namespace in params.spec.workers && params.spec.workers[request.namespace].exists(start, "
    "object.metadata.name.startsWith(start) && "
    f"({_END}.matches('^{POD_NAME_END}$') || size(object.metadata.name) == {POD_NAME_CHARS_MAX} && "
    f"{_END}.matches('^{POD_NAME_END_CUT}$')))"
)
"""CEL expression for Bindings of worker pods. A Binding has its pod's namespace and name, not its labels. It
says the same as :func:`~kvrouter.operator.labels.level_labels.is_pod_of`."""


class BindingTarget(NamedTuple):
    """The pod and the node of a Binding."""

    namespace: str
    name: str
    node: str


def binding_policy(
    name: str, level_labels: Sequence[LevelLabels], namespaces: Collection[str]
) -> tuple[dict[str, JsonValue], ...]:
    """Return the MutatingAdmissionPolicy ``name`` and its binding, which label a pod by its node, in CEL.

    Its parameter is the object ``name`` of :func:`~kvrouter.operator.labels.level_labels.node_places`, made
    for the same ``level_labels``: one lookup for any number of nodes. It applies to that object's Deployments
    in ``namespaces``; names count in their own namespace only, so that no user's names reach another's pods.
    If the policy fails, or does not know the node, the pod is bound without labels: they come late, and
    engines wait for them.
    """
    labels: dict[str, JsonValue] = {"app.kubernetes.io/managed-by": "kvrouter-operator"}
    policy: dict[str, JsonValue] = {
        "apiVersion": API_VERSION,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "paramKind": {"apiVersion": PLACES_VERSION, "kind": PLACES_KIND},
            "matchConstraints": {
                "namespaceSelector": {"matchExpressions": [_namespaces(namespaces)]},
                "resourceRules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods/binding"],
                    }
                ],
            },
            "matchConditions": [{"name": "is-a-worker", "expression": IS_A_WORKER}],
            "variables": [
                {
                    "name": "values",
                    "expression": "object.target.name in params.spec.values ? "
                    "params.spec.values[object.target.name] : []",
                },
            ],
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": _mutation(level_labels)}}],
            "failurePolicy": "Ignore",
            "reinvocationPolicy": "IfNeeded",
        },
    }
    bound: dict[str, JsonValue] = {
        "apiVersion": API_VERSION,
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": name, "labels": labels},
        "spec": {"policyName": name, "paramRef": {"name": name, "parameterNotFoundAction": "Allow"}},
    }
    return policy, bound


def binding_patch(binding: Mapping[str, object], labels: Mapping[str, str]) -> list[JsonValue]:
    """Return the JSON patch that puts ``labels`` onto a Binding; empty if it has them already.

    Since 1.35 the API server copies a Binding's labels onto its pod, over the pod's own values.
    """
    metadata = binding.get("metadata")
    present = metadata.get("labels") if isinstance(metadata, dict) else None
    if not isinstance(present, dict):
        return [{"op": "add", "path": "/metadata/labels", "value": {**labels}}] if labels else []
    return [
        {"op": "add", "path": f"/metadata/labels/{_escaped(key)}", "value": value}
        for key, value in labels.items()
        if present.get(key) != value
    ]


def _escaped(key: str) -> str:
    """Return ``key`` as one step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _namespaces(names: Collection[str]) -> dict[str, JsonValue]:
    return {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [*sorted(names)]}


def _mutation(level_labels: Sequence[LevelLabels]) -> str:
    """Return the patch of :func:`binding_patch` in CEL."""
    adds = ",\n  ".join(
        f'JSONPatch{{op: "add", path: "/metadata/labels/" + jsonpatch.escapeKey({_quoted(level.pod_label)}), '
        f"value: variables.values[{index}]}}"
        for index, level in enumerate(level_labels)
    )
    first = 'JSONPatch{op: "add", path: "/metadata/labels", value: {}}'
    return (
        f"size(variables.values) != {len(level_labels)} ? [] :\n"
        f"(has(object.metadata.labels) ? [] : [{first}]) + [\n  {adds}\n]"
    )


def _quoted(text: str) -> str:
    """Return ``text`` as a CEL string; its escapes are those of JSON."""
    return json.dumps(text)


class BackfilledLabels(NamedTuple):
    """A merge patch for a pod, None if its labels are right, and the levels that its node lacks.

    The patch names the pod's uid, so that the API server refuses it (409) for a later pod of the same name.
    """

    patch: dict[str, JsonValue] | None
    missing: tuple[LevelLabels, ...] = ()


def backfill_labels(pod: Pod, node: Node, level_labels: Sequence[LevelLabels]) -> BackfilledLabels:
    """Return the labels to add to a bound pod, by the current labels of its node.

    No patch for a pod that is not bound to this node, or is over. A value that the node lacks is written
    empty, as at a binding: the pod then shows that its worker's place is unknown.
    """
    if pod.node_name != node.name or pod.is_over:
        return BackfilledLabels(None)
    missing = tuple(level for level in level_labels if not node.labels.get(level.node_label))
    wanted = pod_labels(node.labels, level_labels)
    changed: dict[str, JsonValue] = {
        key: value for key, value in wanted.items() if pod.labels.get(key) != value
    }
    if not changed:
        return BackfilledLabels(None, missing)
    return BackfilledLabels({"metadata": {"uid": pod.uid, "labels": changed}}, missing)
