"""Kubernetes' own schema of a pod template, as a definition may have it inside.

It is read from the package ``kubernetes-validate``, which carries Kubernetes' published OpenAPI (Apache-2.0).
Only names, types and descriptions are taken over: the API server judges the pods that are made of a template,
so that a template which it would take is not refused for a rule that is stricter here.
"""

import json
from functools import cache
from pathlib import Path
from typing import cast

import kubernetes_validate

from kvrouter.operator.api.crd import Schema

KUBERNETES = "v1.37.0"
"""Whose pods are described. Fields of later versions are kept, without a description."""

_FILE = Path("kubernetes-json-schema", f"{KUBERNETES}-local", "_definitions.json")
_POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_NOT_A_TEMPLATES = frozenset(
    {"creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "generation", "managedFields"}
    | {"ownerReferences", "resourceVersion", "selfLink", "uid"}
)
"""What the API server alone writes into the metadata of an object."""

_KEEPS_UNKNOWN: Schema = {"x-kubernetes-preserve-unknown-fields": True}


@cache
def pod_template_schema() -> Schema:
    """Return the structural schema of a pod template. Raises OSError where the package does not have it."""
    text = (Path(kubernetes_validate.__file__).parent / _FILE).read_text("utf-8")
    definitions = cast(dict[str, Schema], json.loads(text)["$defs"])
    return _structural(definitions[_POD_TEMPLATE], definitions)


def _structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return ``node`` as a structural schema has it, with what it refers to. A value may be null, which is as
    if it were left out; nothing is required, and objects keep what is not named here.
    """
    name = str(node.get("$ref", "")).rpartition("/")[2]
    said = _first_sentence(node.get("description") or definitions.get(name, {}).get("description"))
    if name == _QUANTITY:  # a string, or a number of any kind
        return {**said, **_KEEPS_UNKNOWN}
    if name == _INT_OR_STRING:
        return {**said, "nullable": True, "x-kubernetes-int-or-string": True}
    node = definitions.get(name, node)
    types = cast(list[str] | str, node["type"])
    kind = types if isinstance(types, str) else next(each for each in types if each != "null")
    plain: Schema = {**said, "type": kind, "nullable": True}
    if kind == "array":
        plain["items"] = _structural(cast(Schema, node["items"]), definitions)
    elif kind == "object" and "additionalProperties" in node:
        plain["additionalProperties"] = _structural(cast(Schema, node["additionalProperties"]), definitions)
    elif kind == "object":
        fields = cast(dict[str, Schema], node.get("properties", {}))
        plain |= _KEEPS_UNKNOWN
        plain["properties"] = {
            name: _structural(field, definitions)
            for name, field in sorted(fields.items())
            if name not in _NOT_A_TEMPLATES
        }
    return plain


def _first_sentence(text: object) -> Schema:
    """Whole descriptions would make the definition too large for a client that applies it by itself."""
    words = " ".join(str(text or "").split())
    first = words.partition(". ")[0].rstrip(".")
    return {"description": f"{first}."} if first else {}
