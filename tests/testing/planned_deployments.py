"""Deployments for tests of the operator, as users write them, and what is planned for them."""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from kvrouter.operator.api.deployment import DynamoGraphDeployment, read_deployment
from kvrouter.operator.api.grove import ClusterTopology, Level
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.operator.plan.plan import Plan, plan

LEVELS = (Level("zone", "topology.kubernetes.io/zone"), Level("rack", "nvidia.com/rack"))
FACTS = ClusterInfo(grove=Grove.PRESENT, topologies={"gpu-fabric": ClusterTopology("gpu-fabric", LEVELS)})
DEFAULTS = PlanDefaults(image="example.com/kvrouter:1")

TYPES = ("frontend", "prefill", "decode", "worker")


def deployment(
    *,
    policy: Mapping[str, JsonValue] | None = None,
    of_frontend: Mapping[str, JsonValue] | None = None,
    pods: Mapping[str, JsonValue] | None = None,
    types: Sequence[str] = TYPES,
    name: str = "llm",
) -> DynamoGraphDeployment:
    """A deployment with a component of each type, called by it; ``pods`` are templates by component.

    ``policy`` is the graph's kvTransferPolicy, ``of_frontend`` the frontend's kvCacheTransferTopology.
    """
    spec: dict[str, JsonValue] = {"components": [_component(kind, of_frontend, pods or {}) for kind in types]}
    if policy is not None:
        spec["experimental"] = {"kvTransferPolicy": {**policy}}
    if of_frontend is not None:
        spec["topologyConstraint"] = {"clusterTopologyName": "gpu-fabric"}
    metadata: JsonValue = {"name": name, "namespace": "fleet", "uid": "uid-1"}
    reading = read_deployment({"metadata": metadata, "spec": spec})
    assert reading.deployment is not None, reading.problems
    return reading.deployment


def planned(
    of: DynamoGraphDeployment, cluster_info: ClusterInfo = FACTS, defaults: PlanDefaults = DEFAULTS
) -> Plan:
    """What is planned, which has no problems."""
    found = plan(of, cluster_info, defaults)
    assert found.problems == ()
    return found


def templates(found: Plan) -> dict[str, JsonValue]:
    """The pod templates by component."""
    return {
        str(at(manifest, "metadata", "labels", "kvrouter.dev/component")): at(manifest, "spec", "template")
        for manifest in found.manifests
        if manifest["kind"] == "Deployment"
    }


def of_kind(found: Plan, kind: str) -> dict[str, Manifest]:
    """The planned objects of a kind by their names."""
    manifests = [manifest for manifest in found.manifests if manifest["kind"] == kind]
    return {str(at(manifest, "metadata", "name")): manifest for manifest in manifests}


def environment(template: JsonValue, container: int = 0) -> dict[str, str]:
    """The variables of one container that have a value."""
    entries = at(template, "spec", "containers", container, "env")
    assert isinstance(entries, list)
    return {str(at(entry, "name")): str(at(entry, "value")) for entry in entries if has(entry, "value")}


def at(found: JsonValue | Manifest, *path: str | int) -> JsonValue:
    """What stands at ``path``."""
    for step in path:
        if isinstance(step, int):
            assert isinstance(found, list)
            found = found[step]
        else:
            assert isinstance(found, dict)
            found = found[step]
    return found


def has(found: JsonValue, key: str) -> bool:
    """Whether an object has a field."""
    return isinstance(found, dict) and key in found


def _component(
    kind: str, of_frontend: Mapping[str, JsonValue] | None, pods: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    engine: JsonValue = {"spec": {"containers": [{"name": "main", "image": "example.com/engine:1"}]}}
    found: dict[str, JsonValue] = {"name": kind, "type": kind}
    template = pods.get(kind, {} if kind == "frontend" else engine)
    if template != {}:
        found["podTemplate"] = template
    if kind == "frontend" and of_frontend is not None:
        found["kvCacheTransferTopology"] = {**of_frontend}
    return found
