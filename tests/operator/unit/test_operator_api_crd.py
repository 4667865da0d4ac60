"""The definition that clusters install: fresh, structural, and telling on every field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import yaml
from pydantic import BaseModel

from kvrouter.operator.api.crd import CRD_FILE, Schema, crd_yaml, deployment_crd, structural
from scripts.pod_template_schema import pod_template_schema
from scripts.write_crds import main

CRD = deployment_crd(pod_template_schema())
TEMPLATE = ".spec.components[].podTemplate"


def schema_of(crd: Schema) -> Schema:
    spec = cast(Schema, crd["spec"])
    (version,) = cast(list[Schema], spec["versions"])
    return cast(Schema, cast(Schema, version["schema"])["openAPIV3Schema"])


def fields_of(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    for name, field in cast(dict[str, Schema], node.get("properties", {})).items():
        yield f"{path}.{name}", field
        yield from fields_of(field, f"{path}.{name}")
    if "items" in node:
        yield f"{path}[]", cast(Schema, node["items"])
        yield from fields_of(cast(Schema, node["items"]), f"{path}[]")


ALL_FIELDS = dict(fields_of(schema_of(CRD)))
FIELDS = {path: field for path, field in ALL_FIELDS.items() if not path.startswith(f"{TEMPLATE}.")}
POD_FIELDS = {path.removeprefix(TEMPLATE): field for path, field in ALL_FIELDS.items() if path not in FIELDS}


def test_crd_in_the_repository_is_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_a_stale_or_missing_definition_fails_the_check_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy = tmp_path / "deploy"
    assert main(["--check"], deploy) == 1
    assert main([], deploy) == 0
    assert main(["--check"], deploy) == 0
    (deploy / "crds" / CRD_FILE).write_text("kind: Other\n")
    capsys.readouterr()
    assert main(["--check"], deploy) == 1
    assert capsys.readouterr().err == f"deploy/crds/{CRD_FILE}: stale, run make docs\n"
    assert main([], deploy) == 0
    assert main(["--chekc"], deploy) == 2


def test_crd_yaml_equals_the_definition_and_has_no_anchors() -> None:
    text = crd_yaml(pod_template_schema())
    assert yaml.safe_load(text) == CRD
    assert "&id" not in text


def test_every_field_is_described() -> None:
    silent = [path for path, field in FIELDS.items() if not field.get("description")]
    assert silent == [".metadata"]


def test_the_schema_is_structural() -> None:
    """Every value has a type; nothing refers, unites, or allows fields that are not named."""
    for path, field in FIELDS.items():
        assert ("type" in field) is ("x-kubernetes-int-or-string" not in field), path
        assert not {"$ref", "anyOf", "oneOf", "allOf", "title"} & set(field), path
        is_map = path.endswith((".spec.labels", ".annotations"))
        assert field.get("additionalProperties") == ({"type": "string"} if is_map else None), path
        if field.get("type") == "array":
            assert "maxItems" in field, path


def test_lists_merge_by_their_keys() -> None:
    keys = {
        path: field["x-kubernetes-list-map-keys"]
        for path, field in FIELDS.items()
        if field.get("type") == "array" and field["x-kubernetes-list-type"] != "atomic"
    }
    assert keys == {
        ".spec.components": ["name"],
        ".spec.env": ["name"],
        ".spec.components[].kvCacheTransferTopology.networkQoS.levels": ["level"],
        ".status.conditions": ["type"],
        ".status.components": ["name"],
        ".status.domains": ["value"],
    }


def test_pod_template_keeps_fields_that_the_definition_does_not_know() -> None:
    template = FIELDS[".spec.components[].podTemplate"]
    assert template["x-kubernetes-preserve-unknown-fields"] is True
    preserving = [path for path, field in FIELDS.items() if "x-kubernetes-preserve-unknown-fields" in field]
    assert preserving == [TEMPLATE, ".spec.env[].valueFrom"]
    for path, field in POD_FIELDS.items():
        if field.get("type") == "object" and "additionalProperties" not in field:
            assert field["x-kubernetes-preserve-unknown-fields"] is True, path


def test_pod_template_schema_is_that_of_kubernetes() -> None:
    image, env = (POD_FIELDS[f".spec.containers[].{name}"] for name in ("image", "env"))
    assert (image["type"], env["type"]) == ("string", "array")
    assert str(image["description"]).startswith("Container image name")
    assert POD_FIELDS[".spec.containers[].ports[].containerPort"]["type"] == "integer"
    assert ".metadata.labels" in POD_FIELDS
    assert ".metadata.uid" not in POD_FIELDS


def test_pod_template_schema_checks_types_alone() -> None:
    """What an API server takes as a pod is stored: a null, a number as a quantity, what lacks a field."""
    for path, field in POD_FIELDS.items():
        assert not {"required", "default", "enum", "pattern", "x-kubernetes-list-type"} & set(field), path
        if "type" in field:
            assert field["nullable"] is True, path
        else:
            assert {"x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"} & set(field), path


def test_crd_fits_into_the_last_applied_annotation_of_kubectl() -> None:
    """kubectl keeps what it applied in an annotation, of at most 256 KiB."""
    assert len(json.dumps(CRD, separators=(",", ":"))) < 256 * 1024


def test_crd_has_cel_rules_for_immutable_and_exclusive_fields() -> None:
    rules = {
        path: [rule["rule"] for rule in cast(list[dict[str, str]], field["x-kubernetes-validations"])]
        for path, field in FIELDS.items()
        if "x-kubernetes-validations" in field
    }
    assert rules[".spec.components[].type"] == ["self == oldSelf"]
    assert rules[".spec.topologyConstraint.clusterTopologyName"] == ["self == oldSelf"]
    assert (
        "has(self.labelKey) != has(self.clusterTopologyName)" in rules[".spec.experimental.kvTransferPolicy"]
    )
    assert rules[".spec.components[].kvCacheTransferTopology.prefill"] == [
        "!has(self.weight) || !has(self.enforcement) || self.enforcement == 'preferred'"
    ]
    assert "!has(oldSelf.topologyConstraint) || has(self.topologyConstraint)" in rules[".spec"]


def test_crd_has_bounds_for_the_numbers_of_links() -> None:
    """OpenAPI 3.0 has a flag where JSON Schema has a second number."""
    at = ".spec.components[].kvCacheTransferTopology"
    bounds = {
        path: (field["minimum"], field.get("exclusiveMinimum", False))
        for path, field in FIELDS.items()
        if path.startswith(at) and field["type"] == "number"
    }
    assert bounds[f"{at}.kvTransferWeight"] == (0, False)
    for place in ("levels[]", "across", "pairs[]"):
        link = f"{at}.networkQoS.{place}"
        assert bounds[f"{link}.latencySeconds"] == bounds[f"{link}.pricePerGB"] == (0, False)
        assert bounds[f"{link}.bandwidthBytesPerSecond"] == (0, True)


def test_crd_printer_columns_are_the_expected_ones_of_existing_fields() -> None:
    (version,) = cast(list[Schema], cast(Schema, CRD["spec"])["versions"])
    columns = cast(list[Schema], version["additionalPrinterColumns"])
    shown = [column["name"] for column in columns if not column.get("priority")]
    assert shown == ["Ready", "Available", "Domain", "Enforcement", "Prefill/Decode", "Age"]
    for column in columns:
        path = str(column["jsonPath"]).partition("[?")[0]
        assert path in FIELDS or path == ".metadata.creationTimestamp", path


def test_type_without_a_structural_schema_is_refused() -> None:
    class Either(BaseModel):
        value: int | str

    class Anything(BaseModel):
        value: object

    with pytest.raises(TypeError, match="union"):
        structural(Either)
    with pytest.raises(TypeError, match="no structural schema says this"):
        structural(Anything)
