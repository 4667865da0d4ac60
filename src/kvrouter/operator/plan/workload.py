"""A component's Deployment and the frontends' Service."""

from pydantic import JsonValue

from kvrouter.operator.api import API_VERSION, KIND, ComponentSpec, ComponentType, DynamoGraphDeployment
from kvrouter.operator.plan.manifest import (
    TEMPLATE_HASH,
    Manifest,
    labels_of,
    object_name,
    selector,
    strings,
    template_hash,
)


def owned_metadata(
    deployment: DynamoGraphDeployment, name: str, labels: Manifest, annotations: Manifest | None = None
) -> Manifest:
    """Return the metadata of an object that goes when its deployment goes; with what the deployment gives all
    of its objects.
    """
    of = deployment.metadata
    found: Manifest = {"name": name}
    if of.namespace:
        found["namespace"] = of.namespace
    found["labels"] = {**deployment.spec.labels, **labels}
    if annotations or deployment.spec.annotations:
        found["annotations"] = {**deployment.spec.annotations, **(annotations or {})}
    if of.uid:
        owner: JsonValue = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": of.name,
            "uid": of.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        found["ownerReferences"] = [owner]
    return found


def component_metadata(
    deployment: DynamoGraphDeployment, component: ComponentSpec, annotations: Manifest | None = None
) -> Manifest:
    """Return the metadata of a component's objects."""
    name = object_name(deployment.metadata.name, component.name)
    return owned_metadata(deployment, name, labels_of(deployment, component), annotations)


def workload(
    deployment: DynamoGraphDeployment, component: ComponentSpec, template: Manifest, annotations: Manifest
) -> Manifest:
    """Return the Deployment of a component, with the hash of its template among its annotations.

    It states no replicas where the component does not: the number is set by the client that scales it.
    """
    annotations = {TEMPLATE_HASH: template_hash(template), **annotations}
    stated: Manifest = {} if component.replicas is None else {"replicas": component.replicas}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": component_metadata(deployment, component, annotations),
        "spec": {
            **stated,
            "selector": {"matchLabels": strings(selector(deployment.metadata.name, component.name))},
            "strategy": _strategy(component.type),
            "template": template,
        },
    }


def _strategy(kind: ComponentType) -> Manifest:
    """A frontend is replaced by one that is there already; an engine leaves first: the next one needs its
    accelerator.
    """
    if kind is ComponentType.FRONTEND:
        rolling: JsonValue = {"maxSurge": 1, "maxUnavailable": 0}
    else:
        rolling = {"maxSurge": 0, "maxUnavailable": "25%"}
    return {"type": "RollingUpdate", "rollingUpdate": rolling}


def service(deployment: DynamoGraphDeployment, component: ComponentSpec, port: int) -> Manifest:
    """Return the Service on ``port``, which is the frontends' own."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": component_metadata(deployment, component),
        "spec": {
            "type": "ClusterIP",
            "selector": strings(selector(deployment.metadata.name, component.name)),
            "ports": [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }
