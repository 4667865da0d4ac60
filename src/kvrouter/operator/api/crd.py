"""The definition of DynamoGraphDeployment that a cluster installs, made from the models."""

import json
from typing import cast

import yaml
from pydantic import JsonValue

from kvrouter.operator.api.deployment import GROUP, KIND, PLURAL, VERSION, DynamoGraphDeployment
from kvrouter.operator.api.schema import Schema, structural

CRD_NAME = f"{PLURAL}.{GROUP}"
CRD_FILE = f"{GROUP}_{PLURAL}.yaml"
YAML_WIDTH = 110

DEFINITION = "kvrouter.dev/definition"
"""Annotation of every definition that is kvrouter's: its version. One of the same name without it is another
project's.
"""
DEFINITION_VERSION = "0.1.0"
PART_OF = {"app.kubernetes.io/part-of": "kvrouter"}
"""Label of every definition that is kvrouter's, by which they are picked."""


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


COLUMNS: tuple[dict[str, JsonValue], ...] = (
    {
        "name": "Ready",
        "type": "string",
        "description": "Whether every component has its pods, and they are Ready.",
        "jsonPath": _condition("Ready", "status"),
    },
    {
        "name": "Available",
        "type": "string",
        "description": "Whether requests are served.",
        "jsonPath": _condition("Available", "status"),
    },
    {
        "name": "Domain",
        "type": "string",
        "description": "Domain that KV transfers keep to.",
        "jsonPath": ".status.policy.domain",
    },
    {
        "name": "Enforcement",
        "type": "string",
        "description": "How strictly they keep to it.",
        "jsonPath": ".status.policy.enforcement",
    },
    {
        "name": "Prefill/Decode",
        "type": "string",
        "description": "Ready prefill and decode workers of each domain.",
        "jsonPath": ".status.balance",
    },
    {
        "name": "Balanced",
        "type": "string",
        "description": "Whether every domain with prefill workers has decode workers.",
        "jsonPath": _condition("DomainBalanced", "status"),
        "priority": 1,
    },
    {
        "name": "Placed",
        "type": "string",
        "description": "Whether every worker knows its value of the domain.",
        "jsonPath": _condition("TopologyResolved", "status"),
        "priority": 1,
    },
    {
        "name": "Reason",
        "type": "string",
        "description": "Why it is Ready, or is not.",
        "jsonPath": _condition("Ready", "reason"),
        "priority": 1,
    },
    {
        "name": "Message",
        "type": "string",
        "description": "The same in a sentence.",
        "jsonPath": _condition("Ready", "message"),
        "priority": 1,
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


def deployment_crd() -> Schema:
    """Return the CustomResourceDefinition, ``apiextensions.k8s.io/v1``."""
    schema = structural(DynamoGraphDeployment)
    fields = cast(dict[str, Schema], schema["properties"])
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


def crd_yaml() -> str:
    """Return the definition as YAML: the same text on every machine."""
    unshared = json.loads(json.dumps(deployment_crd()))  # what stands twice is written twice, without anchors
    return yaml.safe_dump(unshared, sort_keys=False, width=YAML_WIDTH, allow_unicode=True)
