"""Topology as taints: the form in which a request may name a place."""

from kvrouter.core.ids import Taint
from kvrouter.core.workers import ModelRuntimeConfig

RESERVED_TAINT_PREFIX = "dynamo.topology/"
"""Taints that begin so are made from topology domains, and from nothing else."""


def topology_taint(domain: str, value: str) -> Taint:
    """Return the taint of a worker whose ``domain`` has this ``value``; both are trimmed."""
    return Taint(f"{RESERVED_TAINT_PREFIX}{domain.strip()}={value.strip()}")


def named_domain(taint: Taint) -> tuple[str, str] | None:
    """Return the (domain, value) that ``taint`` names; None when it is no topology taint.

    A domain holds no ``=`` (see :func:`~kvrouter.topology.validation.validate_runtime_config`), so the first
    one ends it. A reserved taint without ``=`` names a domain whose value is empty, which no worker has.
    """
    if not taint.startswith(RESERVED_TAINT_PREFIX):
        return None
    domain, _, value = taint[len(RESERVED_TAINT_PREFIX) :].partition("=")
    return domain.strip(), value.strip()


def topology_domains(config: ModelRuntimeConfig) -> dict[str, str]:
    """Return the worker's domains and values, trimmed; a domain without a name or a value is left out."""
    trimmed = ((domain.strip(), value.strip()) for domain, value in config.topology_domains.items())
    return {domain: value for domain, value in trimmed if domain and value}


def worker_taints(config: ModelRuntimeConfig) -> frozenset[Taint]:
    """Return every taint that the worker carries: its own, and one for each topology domain."""
    places = (topology_taint(domain, value) for domain, value in topology_domains(config).items())
    return config.taints | frozenset(places)
