"""Names that people chose, as words of a subject, a stream or a bucket."""

import re

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


def subject_name(name: str) -> str:
    """Return ``name`` as one word of a subject; whatever has a meaning there becomes ``_``."""
    return _NOT_IN_A_NAME.sub("_", name)
