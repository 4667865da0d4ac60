"""What Flux and others make of a status: the rules of kstatus for kinds that it does not know."""

from collections.abc import Mapping
from typing import Any


def kstatus(found: Mapping[str, Any]) -> str:
    """``Current``, ``InProgress`` or ``Failed``."""
    status = found.get("status", {})
    observed = status.get("observedGeneration")
    if observed is not None and observed != found["metadata"]["generation"]:
        return "InProgress"
    holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if holds.get("Reconciling") == "True":
        return "InProgress"
    if holds.get("Stalled") == "True":
        return "Failed"
    return "Current" if holds.get("Ready", "True") == "True" else "InProgress"
