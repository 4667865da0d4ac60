"""Which node labels a policy asks for, and under which keys pods get them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvrouter.operator.api import Level, topology_label
from kvrouter.operator.facts import ClusterFacts, Grove
from kvrouter.operator.policy import DeploymentPolicy, NamedTopology, RawLabel


class Copy(NamedTuple):
    """One level: the node label that holds its value, and the pod label that gets it."""

    domain: str
    node_label: str
    pod_label: str


class Source(StrEnum):
    """Where the levels of a policy were found; a machine-readable word for the condition that tells it."""

    LABEL = "LabelGiven"
    TOPOLOGY = "TopologyFound"
    GROVE_ABSENT = "GroveAbsent"
    TOPOLOGY_UNREAD = "TopologyUnread"
    TOPOLOGY_ABSENT = "TopologyNotFound"
    LEVEL_ABSENT = "LevelNotFound"

    @property
    def is_found(self) -> bool:
        """Whether the levels are the cluster's own, and hold the policy's domain."""
        return self in (Source.LABEL, Source.TOPOLOGY)


class Resolution(NamedTuple):
    """The copies, broadest level first, and where they come from.

    Where the topology is not found, they are those of the levels that were known last, and at least that of
    the policy's own domain: a topology that somebody deleted stops no fleet.
    """

    copies: tuple[Copy, ...]
    source: Source


def copies_of(levels: Sequence[Level]) -> tuple[Copy, ...]:
    """Return what pods get for the levels of a topology: a label of their own for each."""
    return tuple(Copy(level.domain, level.label_key, topology_label(level.domain)) for level in levels)


def resolve(policy: DeploymentPolicy, facts: ClusterFacts, last_levels: Sequence[Level] = ()) -> Resolution:
    """Return what pods get under ``policy``.

    ``last_levels`` are those of an earlier resolution; they are used while the topology cannot be found.
    """
    if isinstance(policy.source, RawLabel):
        key = policy.source.key
        return Resolution((Copy(policy.domain, key, key),), Source.LABEL)
    source = _source(policy.source, policy.domain, facts)
    levels = facts.topologies[policy.source.name].levels if source is Source.TOPOLOGY else tuple(last_levels)
    copies = copies_of(levels)
    if policy.domain not in (copy.domain for copy in copies):
        # No node has a label under the pod's own key, so the value stays unknown: required fails closed.
        label = topology_label(policy.domain)
        copies = (Copy(policy.domain, label, label), *copies)
    return Resolution(copies, source)


def _source(named: NamedTopology, domain: str, facts: ClusterFacts) -> Source:
    if facts.grove is Grove.ABSENT:
        return Source.GROVE_ABSENT
    if facts.grove is Grove.UNREAD:
        return Source.TOPOLOGY_UNREAD
    topology = facts.topologies.get(named.name)
    if topology is None:
        return Source.TOPOLOGY_ABSENT
    return Source.TOPOLOGY if domain in topology.domains else Source.LEVEL_ABSENT


def pod_labels(node_labels: Mapping[str, str], copies: Sequence[Copy]) -> dict[str, str]:
    """Return the labels of a pod on a node: the node's own values, and an empty one where it has none.

    Empty, not left out: what a user wrote under such a key must not pass for the node's word, and a Binding
    can overwrite a pod's label but not remove it. An empty file counts as a place that is unknown.
    """
    return {copy.pod_label: node_labels.get(copy.node_label, "") for copy in copies}
