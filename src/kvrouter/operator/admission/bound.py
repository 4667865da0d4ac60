"""AdmissionReviews of Bindings: which pod goes to which node, and the labels that go with it."""

import base64
import json
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.core.errors import ProtocolError
from kvrouter.operator.admission.review import answered, mapping_at, read_request
from kvrouter.operator.labels import BoundPod, binding_patch


class BindingReview(NamedTuple):
    """One question: this pod is to be bound. ``binding`` is the Binding that says so."""

    uid: str
    pod: BoundPod
    binding: Mapping[str, object]


def read_binding(body: object) -> BindingReview:
    """Return what an AdmissionReview of a Binding asks. Raises ProtocolError, naming the field, for none."""
    uid, operation, request = read_request(body)
    kind = mapping_at(request.get("kind"), "request.kind")
    if operation != "CREATE" or (kind.get("group"), kind.get("kind")) != ("", "Binding"):
        raise ProtocolError("must be about a Binding that is created", param="request.kind")
    binding = mapping_at(request.get("object"), "request.object")
    target = mapping_at(binding.get("target"), "request.object.target")
    pod = BoundPod(
        _text(request.get("namespace"), "request.namespace"),
        _text(request.get("name"), "request.name"),
        _text(target.get("name"), "request.object.target.name"),
    )
    return BindingReview(uid, pod, binding)


def bind_answer(review: BindingReview, labels: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the AdmissionReview that lets the pod be bound, with ``labels``."""
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
