"""Admission: what a deployment may say, before it is stored."""

from kvrouter.operator.admission.review import Review, answer, judged, read_review
from kvrouter.operator.admission.validate import Verdict, planned_anew, validate, warnings

__all__ = ["Review", "Verdict", "answer", "judged", "planned_anew", "read_review", "validate", "warnings"]
