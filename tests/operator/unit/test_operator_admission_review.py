"""AdmissionReview v1: questions in, answers out."""

from typing import Any

import pytest
from pydantic import JsonValue

from kvrouter.core.errors import ProtocolError
from kvrouter.operator.admission.review import (
    WARNING_CHARS_MAX,
    WARNING_LINES_MAX,
    WARNINGS_CHARS_MAX,
    answer,
    judged,
    read_review,
)
from kvrouter.operator.admission.validate import Verdict
from kvrouter.settings.problems import Problem
from tests.testing.operator_deployments import GROVE, NO_GROVE, Document, deployment
from tests.testing.planned_deployments import DEFAULTS

POLICY: Document = {"clusterTopologyName": "fabric", "domain": "zone"}


def review(**request: JsonValue) -> Document:
    kind: JsonValue = {"group": "nvidia.com", "version": "v1beta1", "kind": "DynamoGraphDeployment"}
    asked: Document = {"uid": "1-2", "name": "my-llm", "kind": kind, "operation": "CREATE", **request}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}


def test_valid_deployment_is_answered_as_allowed() -> None:
    asked = read_review(review(object=deployment(graph=POLICY)))
    assert answer(asked.uid, judged(asked, GROVE, DEFAULTS), asked.name) == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": "1-2", "allowed": True},
    }


def test_refusal_names_the_field_and_the_reason() -> None:
    asked = read_review(review(object=deployment(graph={**POLICY, "domain": "host"})))
    why = "'host' is no level of ClusterTopologyBinding fabric, which has zone, rack"
    assert answer(asked.uid, judged(asked, GROVE, DEFAULTS), asked.name)["response"] == {
        "uid": "1-2",
        "allowed": False,
        "status": {
            "status": "Failure",
            "code": 422,
            "reason": "Invalid",
            "message": f"spec.experimental.kvTransferPolicy.domain: {why}",
            "details": {
                "group": "nvidia.com",
                "kind": "DynamoGraphDeployment",
                "name": "my-llm",
                "causes": [
                    {
                        "reason": "FieldValueInvalid",
                        "field": "spec.experimental.kvTransferPolicy.domain",
                        "message": why,
                    }
                ],
            },
        },
    }


def test_several_problems_have_a_line_each() -> None:
    verdict = Verdict((Problem(("spec", "a"), "is wrong"), Problem(("spec", "b", 0), "is\nbad")))
    response = answer("1", verdict)["response"]
    assert isinstance(response, dict)
    status = response["status"]
    assert isinstance(status, dict)
    assert status["message"] == "\n- spec.a: is wrong\n- spec.b[0]: is bad"


def test_warnings_are_split_and_cut_to_the_limits_of_the_api_server() -> None:
    warnings = tuple(Problem(("spec", "components", number), "is odd " * 60) for number in range(100))
    reported = reported_of(*warnings)
    assert {len(text) <= WARNING_CHARS_MAX for text in reported} == {True}
    assert WARNINGS_CHARS_MAX - WARNING_CHARS_MAX < sum(map(len, reported)) <= WARNINGS_CHARS_MAX
    whole = " ".join(text.removeprefix("… ") for text in reported[:2])
    assert whole == f"spec.components[0]: {'is odd ' * 60}".strip()
    (*most, last) = reported_of(Problem((), "is odd " * 1000))
    assert len(most) == WARNING_LINES_MAX - 1
    assert last.endswith("…")


def reported_of(*warnings: Problem) -> list[str]:
    response = answer("1", Verdict((), warnings))["response"]
    assert isinstance(response, dict)
    reported = response["warnings"]
    assert isinstance(reported, list)
    return [str(text) for text in reported]


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "DELETE", "object": None, "oldObject": deployment(graph=POLICY)},
        {"operation": "UPDATE", "subResource": "status", "object": deployment(graph=POLICY)},
        {"operation": "CREATE", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "object": {}},
        {"operation": "CREATE", "kind": {"group": "nvidia.com", "kind": "Other"}, "object": {}},
    ],
)
def test_review_of_a_deletion_a_status_or_another_kind_is_allowed(request_: Document) -> None:
    assert judged(read_review(review(**request_)), NO_GROVE, DEFAULTS) == Verdict()


def test_update_is_judged_against_the_old_object() -> None:
    old, new = deployment(topology="fabric"), deployment(topology="lab")
    changed = read_review(review(operation="UPDATE", object=new, oldObject=old))
    assert not judged(changed, GROVE, DEFAULTS).is_allowed
    created = read_review(review(operation="CREATE", object=new, oldObject=None))
    assert judged(created, GROVE, DEFAULTS).is_allowed


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "apiVersion"),
        ({**review(), "apiVersion": "admission.k8s.io/v1beta1"}, "apiVersion"),
        ({**review(), "request": None}, "request"),
        (review(uid=""), "request.uid"),
        (review(uid=7), "request.uid"),
        (review(operation=None), "request.operation"),
        (review(kind="Pod"), "request.kind"),
    ],
)
def test_invalid_review_is_refused_with_the_wrong_field(body: object, param: str | None) -> None:
    with pytest.raises(ProtocolError) as refusal:
        read_review(body)
    assert refusal.value.param == param


def test_component_rename_gets_a_warning_of_its_effect() -> None:
    old = deployment()
    new: Any = deployment()
    component = new["spec"]["components"][-1]
    was, component["name"] = component["name"], "renamed"
    asked = read_review(review(object=new, oldObject=old, operation="UPDATE"))
    response: Any = answer("1", judged(asked, NO_GROVE, DEFAULTS))["response"]
    (warning,) = response["warnings"]
    assert f"is new, and {was} is gone" in warning
    assert "Ready, or after 600 s" in warning
