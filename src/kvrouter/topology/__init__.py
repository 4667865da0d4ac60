"""Where a worker is: domains, levels, distance, transfer policy, link cost."""

from kvrouter.topology.distance import NO_SHARED_LEVEL, Distance, distance
from kvrouter.topology.links import ACROSS_LINK, SAME_LEVEL_LINK, Link, LinkTable
from kvrouter.topology.policy import (
    Fallback,
    MismatchPolicy,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferConstraint,
    TransferPolicy,
    derive,
    policy_of,
)
from kvrouter.topology.taints import (
    RESERVED_TAINT_PREFIX,
    named_domain,
    topology_domains,
    topology_taint,
    worker_taints,
)
from kvrouter.topology.validation import validate_runtime_config

__all__ = [
    "ACROSS_LINK",
    "NO_SHARED_LEVEL",
    "RESERVED_TAINT_PREFIX",
    "SAME_LEVEL_LINK",
    "Distance",
    "Fallback",
    "Link",
    "LinkTable",
    "MismatchPolicy",
    "Preferred",
    "Required",
    "RouterTopologyDefault",
    "TransferConstraint",
    "TransferPolicy",
    "derive",
    "distance",
    "named_domain",
    "policy_of",
    "topology_domains",
    "topology_taint",
    "validate_runtime_config",
    "worker_taints",
]
