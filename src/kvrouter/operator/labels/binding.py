"""Labels in the write that binds a pod: a MutatingAdmissionPolicy, or the patch of a webhook in its place."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.labels.copies import (
    PLACES_KIND,
    PLACES_VERSION,
    POD_NAME_CHARS_MAX,
    POD_NAME_END,
    POD_NAME_END_CUT,
    Copy,
    Node,
    Pod,
    pod_labels,
)

API_VERSION = "admissionregistration.k8s.io/v1"
_END = "object.metadata.name.substring(size(start))"
IS_A_WORKER = (
    "request.namespace in params.spec.workers && params.spec.workers[request.namespace].exists(start, "
    "object.metadata.name.startsWith(start) && "
    f"({_END}.matches('^{POD_NAME_END}$') || size(object.metadata.name) == {POD_NAME_CHARS_MAX} && "
    f"{_END}.matches('^{POD_NAME_END_CUT}$')))"
)
"""A Binding knows its pod's namespace and name, and none of its labels. The same in CEL as
:func:`~kvrouter.operator.labels.copies.is_pod_of`.
"""


class BindingTarget(NamedTuple):
    """What a Binding says: this pod goes to this node."""

    namespace: str
    name: str
    node: str


def binding_policy(
    name: str, copies: Sequence[Copy], namespaces: Collection[str]
) -> tuple[dict[str, JsonValue], ...]:
    """Return the MutatingAdmissionPolicy ``name`` and its binding: what pods on a node get, in CEL.

    Its parameter is the object ``name`` of :func:`~kvrouter.operator.labels.copies.node_places`, made for
    the same ``copies``: one lookup, however many nodes there are. It says whose pods in ``namespaces`` are
    meant; names count in their own namespace alone, so that nobody's choice of names reaches another's pods.
    Should the policy fail, or not know the node, pods are bound all the same: their labels then come late,
    and engines wait for them.
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
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": _mutation(copies)}}],
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
    """Return the JSON patch that puts ``labels`` onto a Binding; empty when they are there already.

    The API server copies a Binding's labels onto its pod since 1.35, whatever the pod had under those keys.
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
    """``key`` as one step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _namespaces(names: Collection[str]) -> dict[str, JsonValue]:
    return {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [*sorted(names)]}


def _mutation(copies: Sequence[Copy]) -> str:
    """The patch in CEL, as :func:`binding_patch` makes it."""
    adds = ",\n  ".join(
        f'JSONPatch{{op: "add", path: "/metadata/labels/" + jsonpatch.escapeKey({_quoted(copy.pod_label)}), '
        f"value: variables.values[{index}]}}"
        for index, copy in enumerate(copies)
    )
    first = 'JSONPatch{op: "add", path: "/metadata/labels", value: {}}'
    return (
        f"size(variables.values) != {len(copies)} ? [] :\n"
        f"(has(object.metadata.labels) ? [] : [{first}]) + [\n  {adds}\n]"
    )


def _quoted(text: str) -> str:
    """``text`` as a string of CEL, whose escapes are those of JSON."""
    return json.dumps(text)


class BackfilledLabels(NamedTuple):
    """A merge patch for the pod, None when nothing is to be done; and the levels that its node does not have.

    The patch names the pod's uid, so that the API server refuses it (409) for a later pod of the same name.
    """

    patch: dict[str, JsonValue] | None
    missing: tuple[Copy, ...] = ()


def backfill_labels(pod: Pod, node: Node, copies: Sequence[Copy]) -> BackfilledLabels:
    """Return what is to be done about a pod whose node says ``node.labels`` now.

    Nothing for a pod that is not bound to this node, or is over. A value that the node lacks is written as an
    empty one, as at a binding: that nobody knows its worker's place then shows on the pod.
    """
    if pod.node_name != node.name or pod.is_over:
        return BackfilledLabels(None)
    missing = tuple(copy for copy in copies if not node.labels.get(copy.node_label))
    wanted = pod_labels(node.labels, copies)
    changed: dict[str, JsonValue] = {
        key: value for key, value in wanted.items() if pod.labels.get(key) != value
    }
    if not changed:
        return BackfilledLabels(None, missing)
    return BackfilledLabels({"metadata": {"uid": pod.uid, "labels": changed}}, missing)
