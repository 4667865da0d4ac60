"""Admission: whether a deployment may be stored."""

from kvrouter.operator.admission.review import Review, answer, judged, read_review
from kvrouter.operator.admission.validate import Verdict, changed_manifests, validate, warnings

__all__ = [
    "Review",
    "Verdict",
    "answer",
    "changed_manifests",
    "judged",
    "read_review",
    "validate",
    "warnings",
]
