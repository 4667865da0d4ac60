"""A component's Deployment, around its pod template."""

from pydantic import JsonValue

from kvrouter.operator.api import API_VERSION, KIND, Component, ComponentType, DynamoGraphDeployment
from kvrouter.operator.plan.hashes import TEMPLATE_HASH, template_hash
from kvrouter.operator.plan.manifest import Manifest, strings
from kvrouter.operator.plan.names import labels_of, object_name, selector


def owned_metadata(
    deployment: DynamoGraphDeployment, name: str, labels: Manifest, annotations: Manifest | None = None
) -> Manifest:
    """Return the metadata of an object that goes when its deployment goes."""
    of = deployment.metadata
    found: Manifest = {"name": name}
    if of.namespace:
        found["namespace"] = of.namespace
    found["labels"] = labels
    if annotations:
        found["annotations"] = annotations
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
    deployment: DynamoGraphDeployment, component: Component, annotations: Manifest | None = None
) -> Manifest:
    """Return the metadata of a component's objects."""
    name = object_name(deployment.metadata.name, component.name)
    return owned_metadata(deployment, name, labels_of(deployment, component), annotations)


def workload(
    deployment: DynamoGraphDeployment, component: Component, template: Manifest, annotations: Manifest
) -> Manifest:
    """Return the Deployment of a component, with the hash of its template among its annotations.

    It states no replicas where the component does not: that number is whoever's who scales it.
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
