"""What NetworkPolicies allow, by the rules that Kubernetes documents: for tests without a network plugin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod, or without labels a host outside the cluster."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_pod(self) -> bool:
        return bool(self.labels)


OUTSIDE = Peer()


def is_allowed(
    policies: Sequence[Policy], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether ``source`` may connect to ``target``: both ends must allow it. A pod that no policy selects
    in a direction allows everything; of several, one is enough.
    """
    leaves = _allows(policies, source, target, "Egress", "egress", "to", port, protocol)
    return leaves and _allows(policies, target, source, "Ingress", "ingress", "from", port, protocol)


def _allows(
    policies: Sequence[Policy],
    pod: Peer,
    other: Peer,
    kind: str,
    field_name: str,
    peers: str,
    port: int,
    protocol: str,
) -> bool:
    if not pod.is_pod:
        return True
    found = [
        policy
        for policy in policies
        if policy["metadata"].get("namespace", "default") == pod.namespace
        and kind in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    return not found or any(
        _holds(rule, peers, policy["metadata"].get("namespace", "default"), other, port, protocol)
        for policy in found
        for rule in policy["spec"].get(field_name, [])
    )


def _holds(rule: Policy, peers: str, namespace: str, other: Peer, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    is_port = not ports or any(
        each.get("protocol", "TCP") == protocol and each.get("port", port) == port for each in ports
    )
    listed = rule.get(peers)
    return is_port and (not listed or any(_is_peer(each, namespace, other) for each in listed))


def _is_peer(peer: Policy, namespace: str, other: Peer) -> bool:
    assert not {"ipBlock"} & set(peer), "addresses are not known here"
    if not other.is_pod:
        return False
    if "namespaceSelector" in peer:
        is_namespace = selects(peer["namespaceSelector"], other.namespace_labels)
    else:
        is_namespace = other.namespace == namespace
    return is_namespace and selects(peer.get("podSelector", {}), other.labels)


def selects(selector: Policy, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", []):
        value = labels.get(each["key"])
        holds = {
            "In": value in each.get("values", []),
            "NotIn": value not in each.get("values", []),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds[each["operator"]]:
            return False
    return True
