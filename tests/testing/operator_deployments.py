"""Deployments as users write them, and clusters to judge them in."""

from collections.abc import Mapping

from pydantic import JsonValue

from kvrouter.operator.admission.validate import Verdict, validate
from kvrouter.operator.api.grove import ClusterTopology, Level
from kvrouter.operator.cluster_info import ClusterInfo, Grove, by_name
from tests.testing.planned_deployments import DEFAULTS

Document = dict[str, JsonValue]

FABRIC = ClusterTopology(
    "fabric",
    (Level("zone", "topology.kubernetes.io/zone"), Level("rack", "example.com/rack")),
)
GROVE = ClusterInfo(grove=Grove.PRESENT, topologies=by_name([FABRIC, ClusterTopology("lab", ())]))
NO_GROVE = ClusterInfo()

PAIR = ("frontend", "prefill", "decode")
AGGREGATED = ("frontend", "worker")


def component(kind: str, name: str = "", **fields: JsonValue) -> Document:
    """Return a component of this type, called by it unless named, with an engine where it is to have one."""
    engine: JsonValue = {"spec": {"containers": [{"name": "main", "image": "example.com/engine:1"}]}}
    pods: Document = {} if kind == "frontend" else {"podTemplate": engine}
    return {"name": name or kind, "type": kind, **pods, **fields}


def validated(new: object, old: object | None, cluster_info: ClusterInfo) -> Verdict:
    """The verdict of an operator of these tests."""
    return validate(new, old, cluster_info, DEFAULTS)


def deployment(
    *,
    frontend: Mapping[str, JsonValue] | None = None,
    graph: Mapping[str, JsonValue] | None = None,
    topology: str | None = None,
    types: tuple[str, ...] = PAIR,
    name: str = "my-llm",
) -> Document:
    """Return a deployment with one component of each type: ``frontend`` is its kvCacheTransferTopology,
    ``graph`` the whole graph's kvTransferPolicy, ``topology`` the name of the topology that it is in.
    """
    components: list[JsonValue] = [component(kind) for kind in types]
    if frontend is not None:
        components[0] = component(types[0], kvCacheTransferTopology=dict(frontend))
    spec: Document = {"components": components}
    if graph is not None:
        spec["experimental"] = {"kvTransferPolicy": dict(graph)}
    if topology is not None:
        spec["topologyConstraint"] = {"clusterTopologyName": topology}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }
