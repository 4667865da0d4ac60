"""AdmissionReview v1 as JSON: of deployments, and of pod bindings."""

import base64
import json
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.core.errors import ProtocolError
from kvrouter.operator.admission.validate import Verdict, validate
from kvrouter.operator.api.deployment import GROUP, KIND
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.binding import BindingTarget, binding_patch
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.settings.problems import Problem, dotted

API_VERSION = "admission.k8s.io/v1"
REVIEW_KIND = "AdmissionReview"
WARNING_CHARS_MAX = 256
WARNINGS_CHARS_MAX = 4096
"""The API server cuts a longer warning, and drops warnings beyond this total."""
WARNING_LINES_MAX = 4
"""How many lines one warning may take."""

JUDGED = frozenset({"CREATE", "UPDATE"})


class Review(NamedTuple):
    """A review: may ``new`` take the place of ``old``? ``is_ours``: it is about a deployment."""

    uid: str
    operation: str
    is_ours: bool
    new: object
    old: object
    name: str = ""


class ReviewRequest(NamedTuple):
    """The request of any AdmissionReview: its uid, its operation, and its fields."""

    uid: str
    operation: str
    fields: Mapping[str, object]


def read_request(body: object) -> ReviewRequest:
    """Return the request of an AdmissionReview. Raises ProtocolError, naming the field, if it is invalid."""
    review = mapping_at(body, "")
    if review.get("apiVersion") != API_VERSION or review.get("kind") != REVIEW_KIND:
        raise ProtocolError(f"must be an {REVIEW_KIND} of {API_VERSION}", param="apiVersion")
    request = mapping_at(review.get("request"), "request")
    uid, operation = request.get("uid"), request.get("operation")
    if not isinstance(uid, str) or not uid:
        raise ProtocolError("request.uid: must be there", param="request.uid")
    if not isinstance(operation, str):
        raise ProtocolError("request.operation: must be there", param="request.operation")
    return ReviewRequest(uid, operation, request)


def read_review(body: object) -> Review:
    """Return the review of a deployment. Raises ProtocolError as above."""
    uid, operation, request = read_request(body)
    kind = mapping_at(request.get("kind"), "request.kind")
    return Review(
        uid,
        operation,
        is_ours=kind.get("group") == GROUP and kind.get("kind") == KIND and not request.get("subResource"),
        new=request.get("object"),
        old=request.get("oldObject"),
        name=str(request.get("name") or ""),
    )


def is_judged(review: Review) -> bool:
    """Return whether a review is about the spec of a deployment."""
    return review.is_ours and review.operation in JUDGED


def judged(review: Review, cluster_info: ClusterInfo, defaults: PlanDefaults) -> Verdict:
    """Return the verdict on a review; reviews that are not about a deployment's spec are allowed."""
    if not is_judged(review):
        return Verdict()
    old = review.old if review.operation == "UPDATE" else None
    return validate(review.new, old, cluster_info, defaults)


def answer(uid: str, verdict: Verdict, name: str = "") -> dict[str, JsonValue]:
    """Return the AdmissionReview with ``verdict`` on the deployment ``name``."""
    response: dict[str, JsonValue] = {"uid": uid, "allowed": verdict.is_allowed}
    if verdict.problems:
        response["status"] = {
            "status": "Failure",
            "code": 422,
            "reason": "Invalid",
            "message": _message(verdict.problems),
            "details": {
                "group": GROUP,
                "kind": KIND,
                "name": name,
                "causes": [_cause(problem) for problem in verdict.problems],
            },
        }
    if verdict.warnings:
        response["warnings"] = [*_fitting(verdict.warnings)]
    return answered(response)


def answered(response: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the AdmissionReview around ``response``."""
    return {"apiVersion": API_VERSION, "kind": REVIEW_KIND, "response": response}


def _message(problems: Sequence[Problem]) -> str:
    """Return one problem as a line, several as a list: kubectl shows them as they are."""
    lines = [line(problem) for problem in problems]
    return lines[0] if len(lines) == 1 else "".join(f"\n- {text}" for text in lines)


def _cause(problem: Problem) -> JsonValue:
    return {"reason": "FieldValueInvalid", "field": dotted(problem.path), "message": _printable(problem.must)}


def line(problem: Problem) -> str:
    """Return ``problem`` as one line: its path, and what must be."""
    at = dotted(problem.path)
    return _printable(f"{at}: {problem.must}" if at else problem.must)


def _printable(text: str) -> str:
    """Return ``text`` without unprintable characters, which a header cannot hold."""
    return "".join(char if char.isprintable() else " " for char in text)


def _fitting(warnings: Sequence[Problem]) -> list[str]:
    """Return the warnings that an API server passes on: wrapped to its lines, up to its total."""
    fitting: list[str] = []
    left = WARNINGS_CHARS_MAX
    for warning in warnings:
        for text in wrap(
            line(warning),
            WARNING_CHARS_MAX,
            subsequent_indent="… ",
            max_lines=WARNING_LINES_MAX,
            placeholder="…",
            break_on_hyphens=False,
        ):
            left -= len(text)
            if left < 0:
                return fitting
            fitting.append(text)
    return fitting


def mapping_at(found: object, at: str) -> Mapping[str, object]:
    """Return ``found``, which must be an object. Raises ProtocolError, naming its path, for anything else."""
    if not isinstance(found, dict):
        raise ProtocolError(f"{at or 'body'}: must be an object", param=at or None)
    return found


class BindingReview(NamedTuple):
    """A review of a pod's binding; ``binding`` is the Binding."""

    uid: str
    pod: BindingTarget
    binding: Mapping[str, object]


def read_binding(body: object) -> BindingReview:
    """Return the review of a Binding. Raises ProtocolError, naming the field, if it is invalid."""
    uid, operation, request = read_request(body)
    kind = mapping_at(request.get("kind"), "request.kind")
    if operation != "CREATE" or (kind.get("group"), kind.get("kind")) != ("", "Binding"):
        raise ProtocolError("must be about a Binding that is created", param="request.kind")
    binding = mapping_at(request.get("object"), "request.object")
    target = mapping_at(binding.get("target"), "request.object.target")
    pod = BindingTarget(
        _text(request.get("namespace"), "request.namespace"),
        _text(request.get("name"), "request.name"),
        _text(target.get("name"), "request.object.target.name"),
    )
    return BindingReview(uid, pod, binding)


def bind_answer(review: BindingReview, labels: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the AdmissionReview that allows the binding, and adds ``labels``."""
    response: dict[str, JsonValue] = {"uid": review.uid, "allowed": True}
    patch = binding_patch(review.binding, labels)
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return answered(response)


def _text(found: object, at: str) -> str:
    if not isinstance(found, str) or not found:
        raise ProtocolError(f"{at}: must be there", param=at)
    return found
