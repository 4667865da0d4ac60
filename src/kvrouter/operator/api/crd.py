"""The definition of DynamoGraphDeployment that a cluster installs, made from the models."""

import json
from typing import cast

import yaml
from pydantic import BaseModel, JsonValue

from kvrouter.operator.api.deployment import GROUP, KIND, PLURAL, VERSION, DynamoGraphDeployment

Schema = dict[str, JsonValue]

_ORDER = (
    "description",
    "type",
    "format",
    "enum",
    "default",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "minLength",
    "maxLength",
)
_ORDER_LAST = ("required", "properties", "additionalProperties", "items")
_DROPPED = frozenset({"title", "$defs"})


def structural(model: type[BaseModel]) -> Schema:
    """Return the schema of ``model``. Raises TypeError for a field that no structural schema can state."""
    document = cast(Schema, model.model_json_schema(by_alias=True))
    definitions = cast(dict[str, Schema], document.get("$defs", {}))
    return _plain(document, definitions)


def _plain(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = _inlined(node, definitions)
    plain: Schema = {}
    for key, value in node.items():
        if key in _DROPPED or (key == "default" and value in (None, {}, [])):
            continue
        if key == "additionalProperties" and (isinstance(value, bool) or not _type_known(value, definitions)):
            continue
        if key == "description":
            plain[key] = " ".join(str(value).split()).replace("``", "`")
        elif key == "properties":
            fields = cast(dict[str, Schema], value)
            plain[key] = {name: _plain(field, definitions) for name, field in fields.items()}
        elif key == "exclusiveMinimum":  # a number in JSON Schema, and a flag of the minimum in OpenAPI 3.0
            plain["minimum"], plain[key] = value, True
        elif key in ("items", "additionalProperties"):
            plain[key] = _plain(cast(Schema, value), definitions)
        else:
            plain[key] = value
    if "type" not in plain and "x-kubernetes-int-or-string" not in plain:
        raise TypeError(f"no structural schema says this: {node}")
    return _ordered(plain)


def _type_known(node: JsonValue, definitions: dict[str, Schema]) -> bool:
    """Whether ``node`` states the type of a value; a free JSON value has any type."""
    return "type" in _inlined(cast(Schema, node), definitions)


def _inlined(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return ``node`` with its references inlined; its own keys win over those of the references."""
    own = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix("#/$defs/")
        return {**_inlined(definitions[name], definitions), **own}
    if "anyOf" in node:
        choices = [choice for choice in cast(list[Schema], node["anyOf"]) if choice.get("type") != "null"]
        if len(choices) != 1:
            raise TypeError(f"no structural schema has a union: {node}")
        return {**_inlined(choices[0], definitions), **own}
    return node


def _ordered(plain: Schema) -> Schema:
    """Return the same keys in reading order: the node's own, then its content."""
    middle = sorted(key for key in plain if key not in _ORDER and key not in _ORDER_LAST)
    return {key: plain[key] for key in (*_ORDER, *middle, *_ORDER_LAST) if key in plain}


CRD_NAME = f"{PLURAL}.{GROUP}"
CRD_FILE = f"{GROUP}_{PLURAL}.yaml"
YAML_WIDTH = 110

DEFINITION = "kvrouter.dev/definition"
"""Annotation of kvrouter's definitions: the version. A definition without it is another project's."""
DEFINITION_VERSION = "0.1.0"
PART_OF = {"app.kubernetes.io/part-of": "kvrouter"}
"""Label of kvrouter's definitions, by which they are selected."""


def _column(name: str, description: str, path: str, **others: JsonValue) -> Schema:
    return {"name": name, "type": "string", "description": description, "jsonPath": path, **others}


def _condition(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


COLUMNS: tuple[Schema, ...] = (
    _column("Ready", "Whether every component has its pods, and they are Ready.", _condition("Ready")),
    _column("Available", "Whether requests are served.", _condition("Available")),
    _column("Domain", "Domain that KV transfers keep to.", ".status.policy.domain"),
    _column("Enforcement", "How strictly they keep to it.", ".status.policy.enforcement"),
    _column("Prefill/Decode", "Ready prefill and decode workers of each domain.", ".status.balance"),
    _column(
        "Balanced",
        "Whether every domain with prefill workers has decode workers.",
        _condition("DomainBalanced"),
        priority=1,
    ),
    _column(
        "Placed",
        "Whether every worker knows its value of the domain.",
        _condition("TopologyResolved"),
        priority=1,
    ),
    _column("Reason", "Why it is Ready, or is not.", _condition("Ready", "reason"), priority=1),
    _column("Message", "The same in a sentence.", _condition("Ready", "message"), priority=1),
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


def deployment_crd(pod_template: Schema) -> Schema:
    """Return the CustomResourceDefinition, ``apiextensions.k8s.io/v1``; ``pod_template`` is the structural
    schema of a pod template, which ``kubectl explain`` shows.
    """
    schema = structural(DynamoGraphDeployment)
    fields = cast(dict[str, Schema], schema["properties"])
    template = _at(
        schema, "properties", "spec", "properties", "components", "items", "properties", "podTemplate"
    )
    template["properties"] = pod_template["properties"]
    fields["metadata"] = {"type": "object"}
    for name in ("apiVersion", "kind"):
        del fields[name]["default"]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": CRD_NAME,
            "labels": {**PART_OF},
            "annotations": {DEFINITION: DEFINITION_VERSION},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["dgd"],
                "categories": ["dynamo"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(COLUMNS),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _at(node: Schema, *path: str) -> Schema:
    for name in path:
        node = cast(Schema, node[name])
    return node


def crd_yaml(pod_template: Schema) -> str:
    """Return the definition as YAML: the same text on every machine."""
    unshared = json.loads(
        json.dumps(deployment_crd(pod_template))
    )  # what occurs twice is written twice, without anchors
    return yaml.safe_dump(unshared, sort_keys=False, width=YAML_WIDTH, allow_unicode=True)
