"""NetworkPolicies of a deployment's pods: they allow only the connections that the pods need."""

import re
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from kvrouter.operator.api.deployment import ComponentSpec, ComponentType, DynamoGraphDeployment
from kvrouter.operator.plan.containers import HEALTH_PORT_VARIABLE, http_port
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import (
    DEPLOYMENT_LABEL,
    TYPE_LABEL,
    Manifest,
    labels_of,
    listed,
    objects,
    selector,
    strings,
)
from kvrouter.operator.plan.pod_template import PodDraft, value_of
from kvrouter.operator.plan.workload import component_metadata

DNS_PORT = 53
NATS_PORT = 4222
"""The port of a server without a port in its URL."""

_PORT = re.compile(r":(\d{1,5})/*$")
"""The port at the end of a server's URL; an IPv6 address is in brackets."""

METRICS = "metrics"
"""Name of the container port that a PodMonitor scrapes."""


def network_policy(
    deployment: DynamoGraphDeployment, component: ComponentSpec, draft: PodDraft, defaults: PlanDefaults
) -> Manifest:
    """Return the policy of a component's pods, from its completed containers.

    Any client may connect to a frontend's HTTP port, and to the ports of probes and metrics. Frontends
    connect to workers (requests, KV events), and workers to workers (KV), on any port: engines choose many of
    theirs when they start. All of them may look names up, and reach the API server and NATS.
    """
    is_frontend = component.type is ComponentType.FRONTEND
    open_ports = [http_port(draft.main)] if is_frontend else [*_health_ports(draft)]
    for container in (*draft.containers, *draft.init_containers):
        open_ports += _metrics_ports(container)
    ingress: list[Manifest] = []
    if open_ports:
        ingress.append({"ports": _tcp(sorted(set(open_ports)))})
    if not is_frontend:
        ingress.append({"from": [_pods(deployment, [*ComponentType])]})
    workers = [kind for kind in ComponentType if kind.is_worker]
    egress: list[Manifest] = [
        {"to": [_pods(deployment, workers)]},
        {"ports": [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]},
        {"ports": _tcp(defaults.api_server_ports)},
    ]
    if defaults.nats_server is not None:
        egress.append({"ports": _tcp(nats_ports(defaults.nats_server))})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": component_metadata(deployment, component),
        "spec": {
            "podSelector": {"matchLabels": strings(selector(deployment.metadata.name, component.name))},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": listed(ingress),
            "egress": listed(egress),
        },
    }


def nats_ports(servers: str) -> list[int]:
    """Return the ports in comma-separated NATS URLs, by default 4222."""
    stated = [_PORT.search(server.strip()) for server in servers.split(",")]
    return sorted({NATS_PORT if port is None else int(port[1]) for port in stated})


def _pods(deployment: DynamoGraphDeployment, kinds: Sequence[ComponentType]) -> JsonValue:
    """Return a peer: this deployment's pods of these types."""
    types: JsonValue = {"key": TYPE_LABEL, "operator": "In", "values": [kind.value for kind in kinds]}
    labels: JsonValue = {DEPLOYMENT_LABEL: labels_of(deployment)[DEPLOYMENT_LABEL]}
    return {"podSelector": {"matchLabels": labels, "matchExpressions": [types]}}


def _health_ports(draft: PodDraft) -> Iterator[int]:
    for container in (*draft.containers, *draft.init_containers):
        stated = value_of(container, HEALTH_PORT_VARIABLE) or ""
        if stated.isascii() and stated.isdigit():
            yield int(stated)


def _metrics_ports(container: Manifest) -> list[int]:
    return [
        port
        for entry in objects(container.get("ports"))
        if entry.get("name") == METRICS and isinstance(port := entry.get("containerPort"), int)
    ]


def _tcp(ports: Sequence[int]) -> JsonValue:
    return [{"protocol": "TCP", "port": port} for port in ports]
