"""The hash of a pod template: two templates of one hash are one, and nothing rolls."""

import hashlib
import json

from kvrouter.operator.plan.manifest import Manifest

TEMPLATE_HASH = "kvrouter.dev/template-hash"
"""Annotation of a workload. It is not one of its pods: that alone would roll them."""


def template_hash(template: Manifest) -> str:
    """Return 16 hexadecimal digits: SHA-256 over the template's canonical JSON."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
