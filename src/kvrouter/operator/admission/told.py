"""What is odd about a deployment and may be all the same: warnings that the user sees at once."""

from collections.abc import Iterator

from kvrouter.config.problems import Path, Problem
from kvrouter.operator.admission.placed import listed
from kvrouter.operator.api import ComponentType, DeploymentSpec
from kvrouter.operator.facts import ClusterFacts, Grove
from kvrouter.operator.policy import (
    GRAPH_POLICY,
    TOPOLOGY_NAME,
    Declared,
    NamedTopology,
    RawLabel,
    read_policy,
)

COMPONENTS: Path = ("spec", "components")
RECOMMENDED_LABELS = "app.kubernetes.io/"


def warnings_of(spec: DeploymentSpec, facts: ClusterFacts) -> list[Problem]:
    """Return the warnings on ``spec``: they never depend on what it was before."""
    declared = read_policy(spec).declared
    found = [*_packing(spec, facts)]
    if declared is not None:
        found += [*_balance(spec, declared), *_source(spec, declared, facts)]
    return found


def _balance(spec: DeploymentSpec, declared: Declared) -> Iterator[Problem]:
    types = {component.type for component in spec.components}
    if ComponentType.FRONTEND not in types:
        yield Problem(declared.at, "is kept by frontends, and no component is of type frontend: add one")
    if ComponentType.PREFILL not in types:
        yield Problem(
            declared.at,
            "has no effect: no component is of type prefill, so no KV goes from one worker to another",
        )
    elif not types & {ComponentType.DECODE, ComponentType.WORKER}:
        yield Problem(COMPONENTS, "has prefill workers, and none that decode: every request would be refused")
    if declared.policy.preferred_weight == 0:
        yield Problem(declared.at, "prefers nothing: preferredWeight is 0")


def _source(spec: DeploymentSpec, declared: Declared, facts: ClusterFacts) -> Iterator[Problem]:
    source = declared.policy.source
    if isinstance(source, RawLabel) and source.key.startswith(RECOMMENDED_LABELS):
        yield Problem(
            declared.source_at,
            f"is {source.key!r}, by which people and tools find pods, and pods get their node's value of it: "
            "name a label that says where a node is, such as topology.kubernetes.io/zone",
        )
    if not isinstance(source, NamedTopology):
        return
    constraint = spec.topology_constraint
    if (
        declared.at == GRAPH_POLICY
        and constraint is not None
        and constraint.cluster_topology_name != source.name
    ):
        yield Problem(
            declared.source_at,
            f"is {source.name!r}, but pods are placed by {constraint.cluster_topology_name!r} "
            "(spec.topologyConstraint)",
        )
    topology = facts.topologies.get(source.name)
    if topology is not None and topology.oddities:
        yield Problem(declared.source_at, f"not all of it can be used: {'; '.join(topology.oddities)}")


def _packing(spec: DeploymentSpec, facts: ClusterFacts) -> Iterator[Problem]:
    """Levels that pods are packed into: placement is no part of the policy, so a mistake is no refusal."""
    constraint = spec.topology_constraint
    if constraint is None or facts.grove is not Grove.PRESENT:
        return
    wanted: dict[Path, str] = {}
    if constraint.pack_domain is not None:
        wanted[(*TOPOLOGY_NAME[:-1], "packDomain")] = constraint.pack_domain
    for index, component in enumerate(spec.components):
        if component.topology_constraint is not None:
            at = (*COMPONENTS, index, "topologyConstraint", "packDomain")
            wanted[at] = component.topology_constraint.pack_domain
    topology = facts.topologies.get(constraint.cluster_topology_name)
    for at, domain in wanted.items():
        if topology is None:
            name = constraint.cluster_topology_name
            yield Problem(at, f"has no effect: topology {name!r} is not in this cluster")
        elif domain not in topology.domains:
            yield Problem(
                at,
                f"{domain!r} is no level of {topology.name}, which has {listed(topology.domains)}: "
                "pods are not packed by it",
            )
