"""Where every node is, in one object: by it a policy for bindings knows the node of a pod that is bound, and
whether that is a worker's.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from pydantic import JsonValue

from kvrouter.operator.labels.copies import Copy
from kvrouter.operator.labels.seen import Node

PLACES_VERSION = "kvrouter.dev/v1alpha1"
PLACES_KIND = "KvrouterNodePlaces"
PLACES_PLURAL = "kvrouternodeplaces"

NODES_MAX = 10_000
"""What fits under one key of etcd: twice the nodes that a cluster may have. Pods on those beyond, the last by
name, get their labels late."""

GATHER_S = 0.2
GATHER_NODE_S = 0.001

POD_NAME_STEM_CHARS_MAX = 58
"""A ReplicaSet's pods are named by it and a dash, cut to these characters, and five more of chance."""

POD_NAME_CHARS_MAX = POD_NAME_STEM_CHARS_MAX + 5
_HASH = "[456789bcdf]{1,10}"
_CHANCE = "[bcdfghjklmnpqrstvwxz2456789]{5}"
POD_NAME_END = f"{_HASH}-{_CHANCE}"
"""What follows the stem: the hash that a Deployment's ReplicaSet has in its name, and the five characters. It
has the digits of a number, written so that they make no words; both are a regular expression of RE2 too."""

POD_NAME_END_CUT = f"({_HASH}-?)?{_CHANCE}"
"""What follows it in a name of :data:`POD_NAME_CHARS_MAX` characters, which may have been cut."""


def node_places(
    name: str, copies: Sequence[Copy], nodes: Iterable[Node], workloads: Mapping[str, Collection[str]]
) -> dict[str, JsonValue]:
    """Return the object ``name``: each node's values in the order of ``copies``, empty where it has none, and
    whose pods get them: those of ``workloads``, names of Deployments by their namespace.
    """
    found = sorted(nodes, key=lambda node: node.name)[:NODES_MAX]
    values: dict[str, JsonValue] = {
        node.name: [node.labels.get(copy.node_label, "") for copy in copies] for node in found
    }
    workers: dict[str, JsonValue] = {
        namespace: [*sorted(set(map(pod_name_stem, workloads[namespace])))] for namespace in sorted(workloads)
    }
    return {
        "apiVersion": PLACES_VERSION,
        "kind": PLACES_KIND,
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "kvrouter-operator"}},
        "spec": {
            "levels": [f"{copy.domain}={copy.node_label}" for copy in copies],
            "workers": workers,
            "values": values,
        },
    }


def gather_s(nodes: int) -> float:
    """Return for how long changes of so many nodes are gathered before they are written together.

    The object is written whole, and etcd keeps each of its versions for minutes: while a large cluster grows,
    that would fill it.
    """
    return max(GATHER_S, nodes * GATHER_NODE_S)


def pod_name_stem(workload: str) -> str:
    """Return what the names of a Deployment's pods start with."""
    return f"{workload}-"[:POD_NAME_STEM_CHARS_MAX]


def is_pod_of(stem: str, name: str) -> bool:
    """Return whether a pod has a name as the pods of the Deployment of ``stem`` have it.

    Other pods' names begin alike: those of Deployments with a longer name, of Jobs, of StatefulSets.
    """
    if not name.startswith(stem):
        return False
    end = name.removeprefix(stem)
    is_cut = len(name) == POD_NAME_CHARS_MAX and re.fullmatch(POD_NAME_END_CUT, end)
    return bool(is_cut or re.fullmatch(POD_NAME_END, end))
