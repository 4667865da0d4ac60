"""Whose a deployment is, where several operators read the same kind: an annotation says it."""

from collections.abc import Mapping

CLASS = "kvrouter.dev/class"
"""Annotation of a deployment: the class of the operator that looks after it."""

DEFAULT_CLASS = "kvrouter"
"""The class of an operator that is told none, and of a deployment without the annotation."""


def class_of(document: object) -> str:
    """Return the class of a deployment, any JSON value."""
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    stated = annotations.get(CLASS) if isinstance(annotations, Mapping) else None
    return stated if isinstance(stated, str) else DEFAULT_CLASS
