"""The node labels that a policy reads, and the pod labels that they are copied to."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.api.grove import Level
from kvrouter.operator.api.names import topology_label
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.labels.pods import Node
from kvrouter.operator.policy import DeploymentPolicy, NamedTopology, RawLabel


class LevelLabels(NamedTuple):
    """The labels of one topology level: the node label with its value, and the pod label that gets it."""

    domain: str
    node_label: str
    pod_label: str


class Source(StrEnum):
    """Where the levels of a policy were found; the value is the reason of the condition that reports it."""

    LABEL = "LabelGiven"
    TOPOLOGY = "TopologyFound"
    GROVE_ABSENT = "GroveAbsent"
    TOPOLOGY_UNREAD = "TopologyUnread"
    TOPOLOGY_ABSENT = "TopologyNotFound"
    LEVEL_ABSENT = "LevelNotFound"

    @property
    def is_found(self) -> bool:
        """Whether the cluster defines the levels, and the policy's domain is one of them."""
        return self in (Source.LABEL, Source.TOPOLOGY)


class Resolution(NamedTuple):
    """The labels of each level, broadest first, and their source.

    While the topology cannot be found, they are those of the last known levels, and at least that of the
    policy's own domain: the deletion of a topology stops no fleet.
    """

    level_labels: tuple[LevelLabels, ...]
    source: Source


def level_labels_of(levels: Sequence[Level]) -> tuple[LevelLabels, ...]:
    """Return the labels of a topology's levels, each with a pod label of its own."""
    return tuple(LevelLabels(level.domain, level.label_key, topology_label(level.domain)) for level in levels)


def resolve(
    policy: DeploymentPolicy, cluster_info: ClusterInfo, last_levels: Sequence[Level] = ()
) -> Resolution:
    """Return the level labels of ``policy``.

    ``last_levels`` are those of an earlier resolution; they are used while the topology cannot be found.
    """
    if isinstance(policy.source, RawLabel):
        key = policy.source.key
        return Resolution((LevelLabels(policy.domain, key, key),), Source.LABEL)
    source = _source(policy.source, policy.domain, cluster_info)
    levels = (
        cluster_info.topologies[policy.source.name].levels
        if source is Source.TOPOLOGY
        else tuple(last_levels)
    )
    level_labels = level_labels_of(levels)
    if policy.domain not in (level.domain for level in level_labels):
        # No node has a label under the pod's own key, so the value stays unknown: required fails closed.
        label = topology_label(policy.domain)
        level_labels = (LevelLabels(policy.domain, label, label), *level_labels)
    return Resolution(level_labels, source)


def label_of(resolution: Resolution, domain: str) -> str | None:
    """Return the label of pods that has their value of ``domain``; None if that is not among the levels."""
    return next((each.pod_label for each in resolution.level_labels if each.domain == domain), None)


def _source(named: NamedTopology, domain: str, cluster_info: ClusterInfo) -> Source:
    if cluster_info.grove is Grove.ABSENT:
        return Source.GROVE_ABSENT
    if cluster_info.grove is Grove.UNREAD:
        return Source.TOPOLOGY_UNREAD
    topology = cluster_info.topologies.get(named.name)
    if topology is None:
        return Source.TOPOLOGY_ABSENT
    return Source.TOPOLOGY if domain in topology.domains else Source.LEVEL_ABSENT


def pod_labels(node_labels: Mapping[str, str], level_labels: Sequence[LevelLabels]) -> dict[str, str]:
    """Return the level labels of a pod on a node: the node's values, empty where it has no value.

    A missing value is an empty label: a user's own value under that key must not count as the node's, and a
    Binding can overwrite a pod's label but not remove it. An empty file counts as an unknown place.
    """
    return {level.pod_label: node_labels.get(level.node_label, "") for level in level_labels}


PLACES_VERSION = "kvrouter.dev/v1alpha1"
PLACES_KIND = "KvrouterNodePlaces"
PLACES_PLURAL = "kvrouternodeplaces"

NODES_MAX = 10_000
"""How many nodes fit under one key of etcd: twice as many as a cluster may have. Pods on further nodes, the
last by name, get their labels late."""

GATHER_S = 0.2
GATHER_NODE_S = 0.001

POD_NAME_STEM_CHARS_MAX = 58
"""A ReplicaSet's pods are named by it and a dash, cut to this length, and five random characters."""

POD_NAME_CHARS_MAX = POD_NAME_STEM_CHARS_MAX + 5
_HASH = "[456789bcdf]{1,10}"
_CHANCE = "[bcdfghjklmnpqrstvwxz2456789]{5}"
POD_NAME_END = f"{_HASH}-{_CHANCE}"
"""The end of a pod's name after the stem: the hash of the Deployment's ReplicaSet, and five random
characters. The hash is a number in an alphabet that makes no words. The patterns are valid in RE2 too."""

POD_NAME_END_CUT = f"({_HASH}-?)?{_CHANCE}"
"""The end of a name of :data:`POD_NAME_CHARS_MAX` characters, which may have been cut."""


def node_places(
    name: str,
    level_labels: Sequence[LevelLabels],
    nodes: Iterable[Node],
    workloads: Mapping[str, Collection[str]],
) -> dict[str, JsonValue]:
    """Return KvrouterNodePlaces ``name``: the values of each node, up to NODES_MAX nodes, in the order of
    ``level_labels``, empty for none; and the ``workloads`` that get them, Deployments by namespace.
    """
    found = sorted(nodes, key=lambda node: node.name)[:NODES_MAX]
    values: dict[str, JsonValue] = {
        node.name: [node.labels.get(level.node_label, "") for level in level_labels] for node in found
    }
    workers: dict[str, JsonValue] = {
        namespace: [*sorted(set(map(pod_name_stem, workloads[namespace])))] for namespace in sorted(workloads)
    }
    return {
        "apiVersion": PLACES_VERSION,
        "kind": PLACES_KIND,
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "kvrouter-operator"}},
        "spec": {
            "levels": [f"{level.domain}={level.node_label}" for level in level_labels],
            "workers": workers,
            "values": values,
        },
    }


def gather_s(nodes: int) -> float:
    """Return how long changes of ``nodes`` nodes are gathered before they are written together.

    Each write replaces the whole object, and etcd keeps every version for minutes: a growing large cluster
    would fill it.
    """
    return max(GATHER_S, nodes * GATHER_NODE_S)


def pod_name_stem(workload: str) -> str:
    """Return the start of the names of a Deployment's pods."""
    return f"{workload}-"[:POD_NAME_STEM_CHARS_MAX]


def is_pod_of(stem: str, name: str) -> bool:
    """Return whether ``name`` has the form of a pod's name in the Deployment with this ``stem``.

    Other pods' names may have this stem: those of longer-named Deployments, Jobs or StatefulSets.
    """
    if not name.startswith(stem):
        return False
    end = name.removeprefix(stem)
    is_cut = len(name) == POD_NAME_CHARS_MAX and re.fullmatch(POD_NAME_END_CUT, end)
    return bool(is_cut or re.fullmatch(POD_NAME_END, end))
