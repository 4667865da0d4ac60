"""Whether the topology that a policy names is there, and has the level that it names."""

from kvrouter.config.problems import Problem, did_you_mean
from kvrouter.operator.api import ClusterTopology
from kvrouter.operator.facts import ClusterFacts, Grove
from kvrouter.operator.policy import GRAPH_POLICY, Declared, NamedTopology

LISTED_MAX = 10


def topology_problems(declared: Declared, facts: ClusterFacts) -> list[Problem]:
    """Return what is wrong with a policy in this cluster; nothing when its source is a raw label."""
    source = declared.policy.source
    if not isinstance(source, NamedTopology):
        return []
    if facts.grove is Grove.ABSENT:
        return [
            Problem(
                declared.source_at,
                f"{source.name!r} cannot be read: this cluster knows no ClusterTopologyBinding and no "
                f"ClusterTopology (grove.io). Install Grove, or {_without_grove(declared)}",
            )
        ]
    if facts.grove is Grove.UNREAD:
        because = f" ({facts.unread_because})" if facts.unread_because else ""
        return [
            Problem(
                declared.source_at,
                f"{source.name!r} could not be read just now{because}: try again, "
                f"or {_without_grove(declared)}",
            )
        ]
    topology = facts.topologies.get(source.name)
    if topology is None:
        names = sorted(facts.topologies)
        there = f"there are {listed(names)}{did_you_mean(source.name, names)}" if names else "there is none"
        return [
            Problem(
                declared.source_at,
                f"no ClusterTopologyBinding or ClusterTopology {source.name!r} is in this cluster; {there}. "
                f"Name one that is there, create it, or {_without_grove(declared)}",
            )
        ]
    return _level_problems(declared, topology)


def _level_problems(declared: Declared, topology: ClusterTopology) -> list[Problem]:
    domain = declared.policy.domain
    if domain in topology.domains:
        return []
    levels = f"has {listed(topology.domains)}" if topology.domains else "has none that can be used"
    odd = f" ({'; '.join(topology.oddities)})" if topology.oddities else ""
    return [
        Problem(
            declared.domain_at,
            f"{domain!r} is no level of {topology.kind} {topology.name}, which {levels}"
            f"{did_you_mean(domain, topology.domains)}{odd}",
        )
    ]


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - LISTED_MAX
    return ", ".join(names[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _without_grove(declared: Declared) -> str:
    """How the same policy is written without a topology."""
    if declared.at == GRAPH_POLICY:
        return "replace clusterTopologyName by labelKey, the key of a node label, which needs no Grove"
    return "set kvCacheTransferTopology.label to the key of a node label, which needs no Grove"
