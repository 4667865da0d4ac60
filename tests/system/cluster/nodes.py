"""The nodes that every control plane of these tests has."""

from tests.system.cluster.control_plane import ControlPlane

ZONE = "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
RACK = "example.com/rack"
"""A label that Kubernetes knows nothing of, as an owner of nodes would choose one."""

ZONES = ("zone-a", "zone-b", "zone-c")
RACKS_PER_ZONE = 2


def add_nodes(plane: ControlPlane) -> None:
    """One region, three zones, two racks in each, one node in each; returns once they are ready."""
    for zone in ZONES:
        for i in range(RACKS_PER_ZONE):
            plane.add_node(f"{zone}-{i}", {REGION: "region-1", ZONE: zone, RACK: f"{zone}-rack-{i}"})
    plane.kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")
