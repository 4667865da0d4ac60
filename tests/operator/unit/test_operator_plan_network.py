"""NetworkPolicies: every connection that planned pods need is allowed, and others are not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic import JsonValue

from kvrouter.operator.plan.containers import HEALTH_PORT, HTTP_PORT
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.network import nats_ports
from kvrouter.settings.planes import DiscoveryBackend
from tests.testing.helm_chart import of_kind as of_kind_in
from tests.testing.helm_chart import shape
from tests.testing.network_policies import OUTSIDE, Peer, Policy, is_allowed
from tests.testing.planned_deployments import at, deployment, of_kind, planned, templates

DEFAULTS = PlanDefaults(image="example.com/kvrouter:1", network_policies=True)
MOCK: JsonValue = {"spec": {"containers": [{"name": "main", "args": ["worker", "mock"]}]}}
ANY_PORT = 41_234
"""One of those that an engine, or a worker without ``--listen-port``, chooses when it starts."""

DNS, API, NATS = 53, (443, 6443), 4222
KINDS = ("frontend", "prefill", "decode", "worker")


def policies(defaults: PlanDefaults = DEFAULTS, name: str = "llm", **pods: JsonValue) -> list[Policy]:
    """Those of a deployment of each type of component, whose workers kvrouter runs."""
    return [cast(Policy, each) for each in of_kind(plan_of(defaults, name, pods), "NetworkPolicy").values()]


def plan_of(
    defaults: PlanDefaults = DEFAULTS, name: str = "llm", pods: Mapping[str, JsonValue] | None = None
) -> Any:
    own = {**dict.fromkeys(KINDS[1:], MOCK), **(pods or {})}
    return planned(deployment(pods=own, name=name), defaults=defaults)


def peers(name: str = "llm", namespace: str = "fleet") -> dict[str, Peer]:
    """A pod of each component, with the labels that it is planned with."""
    return {
        kind: Peer(namespace, cast(dict[str, str], at(template, "metadata", "labels")))
        for kind, template in templates(plan_of(name=name)).items()
    }


PODS = peers()
STRANGER = Peer("fleet", {"app": "other"})
NEIGHBOUR = peers("other")
FAR = peers(namespace="elsewhere")
WORKERS = KINDS[1:]


def test_no_network_policy_is_planned_by_default() -> None:
    assert not of_kind(planned(deployment()), "NetworkPolicy")


@pytest.mark.parametrize("source", ["frontend", *WORKERS])
@pytest.mark.parametrize("target", WORKERS)
def test_pods_of_the_deployment_reach_workers_on_every_port(source: str, target: str) -> None:
    assert is_allowed(policies(), PODS[source], PODS[target], ANY_PORT)


def test_any_source_reaches_frontend_http_and_worker_health_ports() -> None:
    found = policies()
    for source in (OUTSIDE, STRANGER, NEIGHBOUR["worker"], FAR["worker"]):
        assert is_allowed(found, source, PODS["frontend"], HTTP_PORT)
        for kind in WORKERS:
            assert is_allowed(found, source, PODS[kind], HEALTH_PORT)


def test_every_pod_may_reach_dns_the_api_server_and_nats_where_used() -> None:
    over_nats = replace(DEFAULTS, discovery=DiscoveryBackend.NATS, nats_server="nats://a:4222,tls://b:5222,c")
    for kind in KINDS:
        for port in API:
            assert is_allowed(policies(), PODS[kind], OUTSIDE, port)
        for protocol in ("UDP", "TCP"):
            assert is_allowed(policies(), PODS[kind], OUTSIDE, DNS, protocol)
        assert not is_allowed(policies(), PODS[kind], OUTSIDE, NATS)
        for port in (NATS, 5222):
            assert is_allowed(policies(over_nats), PODS[kind], OUTSIDE, port)
        only = replace(DEFAULTS, api_server_ports=(16443,))
        assert is_allowed(policies(only), PODS[kind], OUTSIDE, 16443)
        assert not is_allowed(policies(only), PODS[kind], OUTSIDE, 443)


def test_connections_that_no_pod_needs_are_not_allowed() -> None:
    found = policies()
    for source in (OUTSIDE, STRANGER, NEIGHBOUR["frontend"], FAR["frontend"]):
        for kind in WORKERS:
            assert not is_allowed(found, source, PODS[kind], ANY_PORT)
            assert not is_allowed(found, source, PODS[kind], HTTP_PORT)
        assert not is_allowed(found, source, PODS["frontend"], ANY_PORT)
    for kind in KINDS:
        assert not is_allowed(found, PODS[kind], PODS["frontend"], ANY_PORT)
        assert not is_allowed(found, PODS[kind], PODS["frontend"], HTTP_PORT)
        for target in (STRANGER, NEIGHBOUR["worker"], FAR["worker"], OUTSIDE):
            assert not is_allowed(found, PODS[kind], target, ANY_PORT)
        assert not is_allowed(found, PODS[kind], OUTSIDE, API[0], "UDP")


def test_additional_network_policy_of_the_namespace_opens_a_port() -> None:
    own: Policy = {
        "metadata": {"namespace": "fleet", "name": "own"},
        "spec": {
            "podSelector": {"matchLabels": {"kvrouter.dev/deployment": "llm"}},
            "policyTypes": ["Egress"],
            "egress": [{"ports": [{"port": 4317}]}],
        },
    }
    assert not is_allowed(policies(), PODS["worker"], OUTSIDE, 4317)
    assert is_allowed([*policies(), own], PODS["worker"], OUTSIDE, 4317)


def test_network_policy_ports_are_those_of_the_containers() -> None:
    frontend: JsonValue = {
        "spec": {"containers": [{"name": "main", "env": [{"name": "KVROUTER_HTTP_PORT", "value": "9000"}]}]}
    }
    worker: JsonValue = {
        "spec": {
            "containers": [
                {"name": "main", "image": "e", "ports": [{"name": "metrics", "containerPort": 8081}]},
                {"name": "side", "args": ["worker", "vllm", "--url", "http://localhost:8000"]},
            ]
        }
    }
    found = policies(frontend=frontend, worker=worker)
    assert is_allowed(found, OUTSIDE, PODS["frontend"], 9000)
    assert not is_allowed(found, OUTSIDE, PODS["frontend"], HTTP_PORT)
    assert is_allowed(found, OUTSIDE, PODS["worker"], 8081)
    assert is_allowed(found, OUTSIDE, PODS["worker"], HEALTH_PORT + 1)
    assert not is_allowed(found, OUTSIDE, PODS["worker"], HEALTH_PORT)
    assert not is_allowed(found, OUTSIDE, PODS["prefill"], 8081)


@pytest.mark.parametrize(
    ("servers", "ports"),
    [
        ("nats://n", [4222]),
        ("n", [4222]),
        ("n:5000, tls://user:word@[::1]:6000", [5000, 6000]),
        ("nats://n:port", [4222]),
    ],
)
def test_nats_ports_are_read_from_server_addresses(servers: str, ports: list[int]) -> None:
    assert nats_ports(servers) == ports


# The chart's own pods.


def test_chart_network_policies_allow_its_operator_and_nats_connections() -> None:
    manifests = shape("everything of pods")
    own = of_kind_in(manifests, "NetworkPolicy")
    namespace = own[0]["metadata"]["namespace"]
    operator, nats = (
        Peer(namespace, each["spec"]["template"]["metadata"]["labels"])
        for kind in ("Deployment", "StatefulSet")
        for each in of_kind_in(manifests, kind)
    )
    for port in (9443, 8080):
        assert is_allowed(own, OUTSIDE, operator, port)
    assert not is_allowed(own, OUTSIDE, operator, ANY_PORT)
    assert is_allowed(own, operator, OUTSIDE, 16443)
    assert is_allowed(own, operator, OUTSIDE, DNS, "UDP")
    assert is_allowed(own, operator, PODS["frontend"], 9000)
    assert not is_allowed(own, operator, PODS["worker"], ANY_PORT)
    for kind in KINDS:
        assert is_allowed(own, PODS[kind], nats, NATS)
    assert not is_allowed(own, STRANGER, nats, NATS)
    assert not is_allowed(own, nats, OUTSIDE, API[0])


def test_chart_value_sets_the_operators_network_policy_flags() -> None:
    container = of_kind_in(shape("everything of pods"), "Deployment")[0]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert {"--network-policies", "--api-server-port=16443"} <= set(container["args"])
    assert not of_kind_in(shape("default"), "NetworkPolicy")
