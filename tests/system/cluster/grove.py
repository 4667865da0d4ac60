"""As much of Grove as concerns us: its kinds of topologies, without its operator."""

from collections.abc import Mapping
from typing import Any

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import WAIT

BINDING = "ClusterTopologyBinding"


def install_grove(plane: ControlPlane, kind: str = BINDING) -> None:
    """Make the API server know a kind of Grove's; it takes whatever is in its spec."""
    plural = "clustertopologybindings" if kind == BINDING else "clustertopologies"
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": free}}
    spec = {"group": "grove.io", "scope": "Cluster", "names": names, "versions": [version]}
    name = f"{plural}.grove.io"
    of = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    plane.apply({**of, "metadata": {"name": name}, "spec": spec})
    plane.kubectl("wait", "--for=condition=Established", f"crd/{name}", WAIT)


def topology(
    name: str, levels: Mapping[str, str], kind: str = BINDING, qos: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The manifest of a topology: node labels by domain, broadest first; ``qos`` are links of the whole."""
    key = "key" if kind == BINDING else "labelKey"
    listed = [{"domain": domain, key: label} for domain, label in levels.items()]
    return {
        "apiVersion": "grove.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"levels": listed, **({} if qos is None else {"networkQoS": qos})},
    }
