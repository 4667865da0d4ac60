"""Admission: what a deployment may say, before it is stored."""

from kvrouter.operator.admission.review import Review, answer, judged, read_review
from kvrouter.operator.admission.validate import Verdict, validate

__all__ = ["Review", "Verdict", "answer", "judged", "read_review", "validate"]
