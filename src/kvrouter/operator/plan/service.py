"""The Service before a component's frontends."""

from kvrouter.operator.api import Component, DynamoGraphDeployment
from kvrouter.operator.plan.manifest import Manifest, strings
from kvrouter.operator.plan.names import selector
from kvrouter.operator.plan.workload import component_metadata


def service(deployment: DynamoGraphDeployment, component: Component, port: int) -> Manifest:
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
