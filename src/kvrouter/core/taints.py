"""The kinds of taints: reserved ones, which topology domains and adapters give, and a worker's own."""

from collections.abc import Iterable
from typing import Final

from kvrouter.core.constraints import RoutingConstraints
from kvrouter.core.ids import Taint
from kvrouter.core.workers import ModelRuntimeConfig

TOPOLOGY: Final = "dynamo.topology/"
ADAPTER: Final = "kvrouter.adapter/"

RESERVED: Final = {
    TOPOLOGY: "topology taints come from domains",
    ADAPTER: "adapter taints come from the engine",
}
"""The kinds of reserved taints: their prefix, and why fleet files, flags and annotations must not have it."""


def topology_taint(domain: str, value: str) -> Taint:
    """Return the taint of a worker whose ``domain`` has this ``value``; both are trimmed."""
    return Taint(f"{TOPOLOGY}{domain.strip()}={value.strip()}")


def named_domain(taint: Taint) -> tuple[str, str] | None:
    """Return (domain, value) of a topology taint, None for another; the first ``=`` ends the domain."""
    if not taint.startswith(TOPOLOGY):
        return None
    domain, _, value = taint[len(TOPOLOGY) :].partition("=")
    return domain.strip(), value.strip()


def worker_taints(config: ModelRuntimeConfig) -> frozenset[Taint]:
    """Return every taint that the worker carries: those its card lists, and one for each topology domain."""
    return config.taints | {topology_taint(domain, value) for domain, value in config.domains.items()}


def listed_taints(carried: Iterable[str]) -> list[str]:
    """Return those of a worker's taints that its card lists: all but those that are derived from domains."""
    return [taint for taint in carried if not taint.startswith(TOPOLOGY)]


def own_taints(carried: Iterable[str]) -> list[str]:
    """Return those of a worker's taints that its user gave it."""
    return [taint for taint in carried if not taint.startswith(tuple(RESERVED))]


def adapter_taints(names: Iterable[str | None]) -> frozenset[Taint]:
    """Return the taints of adapters: a worker lists those of its engine, a call requires its own."""
    return frozenset(Taint(f"{ADAPTER}{name}") for name in names if name is not None)


def required_taints(constraints: RoutingConstraints, *, prefill: bool) -> frozenset[Taint]:
    """Return the taints that the worker of a leg must carry."""
    if prefill or not constraints.required_decode_taints:
        return constraints.required_taints
    return constraints.required_taints | constraints.required_decode_taints
