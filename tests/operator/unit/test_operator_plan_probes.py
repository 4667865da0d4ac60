"""What workers' pods are asked: whether they take requests, where kvrouter knows how to ask."""

import pytest
from pydantic import JsonValue

from kvrouter.operator.plan.containers import HEALTH_PORT
from kvrouter.operator.plan.manifest import Manifest, objects
from kvrouter.settings.problems import dotted
from tests.testing.planned_deployments import at, deployment, environment, has, of_kind, planned, templates


def test_only_containers_that_run_a_kvrouter_worker_get_its_probes() -> None:
    of_kvrouter: JsonValue = {"name": "main", "args": ["worker", "vllm", "--url", "http://localhost:8000"]}
    engine: JsonValue = {"name": "engine", "image": "vllm", "args": ["worker"]}
    tool: JsonValue = {"name": "tool", "args": ["topology", "check"]}
    own_image: Manifest = {"name": "mine", "image": "mine", "command": ["kvrouter", "worker", "mock"]}
    companion: JsonValue = {**own_image, "name": "with", "restartPolicy": "Always"}
    spec: JsonValue = {"containers": [engine, of_kvrouter, tool, own_image], "initContainers": [companion]}
    template = templates(planned(deployment(pods={"worker": {"spec": spec}})))["worker"]
    for kind, index, port in (
        ("containers", 1, HEALTH_PORT + 1),
        ("containers", 3, HEALTH_PORT + 3),
        ("initContainers", 0, HEALTH_PORT + 4),
    ):
        container = at(template, "spec", kind, index)
        assert {"name": "KVROUTER_HEALTH_PORT", "value": str(port)} in objects(at(container, "env"))
        for probe, path in (("startup", "/health"), ("readiness", "/accepting"), ("liveness", "/health")):
            assert at(container, f"{probe}Probe", "httpGet") == {"path": path, "port": port}
    for index in (0, 2):
        assert not has(at(template, "spec", "containers", index), "readinessProbe")
        assert not has(at(template, "spec", "containers", index), "livenessProbe")


@pytest.mark.parametrize(
    ("main", "reported"),
    [
        ({"env": [{"name": "DYN_HTTP_PORT", "value": "9000"}]}, []),
        ({"env": [{"name": "KVROUTER_HTTP_PORT", "value": "9000"}]}, []),
        ({"env": [{"name": "DYN_HTTP_PORT", "value": "0"}]}, ["env DYN_HTTP_PORT must be a port from 1 to"]),
        ({"env": [{"name": "DYN_HTTP_PORT", "value": 9000}]}, []),
        ({"env": [{"name": "DYN_HTTP_PORT", "value": "9" * 5000}]}, ["env DYN_HTTP_PORT must be a port"]),
        (
            {"env": [{"name": "DYN_HTTP_PORT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "p"}}}]},
            ["env DYN_HTTP_PORT is not written here, so the Service and the probes take 8000"],
        ),
        ({"args": ["frontend", "--http-port=8000"]}, []),
        (
            {"args": ["frontend", "--http-port", "9000"]},
            ["args --http-port 9000 counts for the frontend, and the Service and the probes take 8000"],
        ),
        ({"args": ["frontend", "--http-port"]}, ["args --http-port  counts for the frontend"]),
        (
            {
                "env": [{"name": "DYN_HTTP_PORT", "value": "9000"}],
                "livenessProbe": {"tcpSocket": {"port": 1}},
            },
            ["livenessProbe asks port 1, and the frontend listens on 9000"],
        ),
        (
            {
                "ports": [{"name": "web", "containerPort": 8000}, {"name": "other", "containerPort": 8001}],
                "readinessProbe": {"httpGet": {"port": "web"}},
                "startupProbe": {"httpGet": {"port": "other"}},
            },
            ["startupProbe asks port 8001, and the frontend listens on 8000"],
        ),
        ({"readinessProbe": {"exec": {}}, "startupProbe": {"httpGet": {"port": "8000"}}}, []),
    ],
)
def test_a_port_that_service_and_probes_cannot_follow_is_reported(
    main: Manifest, reported: list[str]
) -> None:
    found = planned(deployment(types=("frontend",), pods={"frontend": pod_of(main)}))
    lines = [f"{warning.path[-1]} {warning.must}" for warning in found.warnings]
    assert len(lines) == len(reported)
    assert all(line.startswith(words) for line, words in zip(lines, reported, strict=True)), lines


def pod_of(main: Manifest) -> JsonValue:
    return {"spec": {"containers": [{"name": "main", **main}]}}


def test_variable_set_by_the_user_is_not_planned_under_another_name() -> None:
    said: JsonValue = [
        {"name": "KVROUTER_HTTP_PORT", "value": "9000"},
        {"name": "DYN_HEALTH_PORT", "value": "7"},
    ]
    found = planned(deployment(types=("frontend", "worker"), pods={"frontend": pod_of({"env": said})}))
    names = environment(templates(found)["frontend"])
    assert "DYN_HTTP_PORT" not in names
    (service,) = of_kind(found, "Service").values()
    assert at(service, "spec", "ports", 0, "port") == 9000


def test_policy_variable_of_the_user_is_removed_under_its_other_name() -> None:
    forged: JsonValue = [{"name": "KVROUTER_KV_TRANSFER_DOMAIN", "value": "rack"}]
    main: Manifest = {"image": "example.com/engine:1", "env": forged}
    found = planned(
        deployment(policy={"labelKey": "a.b/zone", "domain": "zone"}, pods={"decode": pod_of(main)})
    )
    assert "KVROUTER_KV_TRANSFER_DOMAIN" not in environment(templates(found)["decode"])
    (warning,) = found.warnings
    assert (
        "KVROUTER_KV_TRANSFER_DOMAIN follows from the policy of KV transfers, and becomes 'zone'"
        in warning.must
    )


def test_a_users_own_health_port_and_probes_of_a_worker_win() -> None:
    def worker(entry: JsonValue, **probes: JsonValue) -> JsonValue:
        main: JsonValue = {"name": "main", "args": ["worker", "mock"], "env": [entry], **probes}
        return {"spec": {"containers": [main]}}

    mine: JsonValue = {"name": "KVROUTER_HEALTH_PORT", "value": "7"}
    unknown: JsonValue = {"name": "KVROUTER_HEALTH_PORT", "valueFrom": {"configMapKeyRef": {"name": "c"}}}
    found = templates(planned(deployment(pods={"worker": worker(mine, livenessProbe={"exec": {}})})))[
        "worker"
    ]
    assert at(found, "spec", "containers", 0, "readinessProbe", "httpGet", "port") == 7
    assert at(found, "spec", "containers", 0, "livenessProbe") == {"exec": {}}
    found = templates(planned(deployment(pods={"worker": worker(unknown)})))["worker"]
    assert not has(at(found, "spec", "containers", 0), "readinessProbe")


def test_host_network_pod_declares_every_fixed_port_and_is_warned_of() -> None:
    words: JsonValue = ["worker", "mock", "--listen-port", "7000"]
    other: JsonValue = {"name": "own", "command": ["kvrouter", "worker", "mock"], "image": "own"}
    probe: JsonValue = {"httpGet": {"path": "/live", "port": 8003}}
    engine: JsonValue = {
        **{"name": "engine", "image": "vllm", "ports": [{"containerPort": 8001}]},
        **{"args": ["--port=8002"], "livenessProbe": probe},
    }
    spec: dict[str, JsonValue] = {"containers": [{"name": "main", "args": words}, other, engine]}
    pods: dict[str, JsonValue] = {
        "worker": {"spec": {**spec, "hostNetwork": True}},
        "decode": {"spec": spec},
        "frontend": {"spec": {"hostNetwork": True, "containers": [{"name": "main"}]}},
    }
    found = planned(deployment(types=("frontend", "decode", "worker"), pods=pods))
    made = templates(found)
    assert declared(made["worker"]) == {HEALTH_PORT, 7000, HEALTH_PORT + 1, 8001, 8002, 8003}
    assert declared(made["decode"]) == {8001}  # its pods do not roll for this
    assert declared(made["frontend"]) == {8000}
    assert at(made["worker"], "spec", "dnsPolicy") == "ClusterFirstWithHostNet"
    reported = {dotted(warning.path): warning.must for warning in found.warnings}
    where = "spec.components[{}].podTemplate.spec.hostNetwork"
    assert reported[where.format(2)].startswith("pods take 7000, 8001, 8002, 8003, 9190, 9191 of")
    assert reported[where.format(0)].endswith("(DYN_HTTP_PORT)")


def declared(template: JsonValue) -> set[JsonValue]:
    containers = objects(at(template, "spec", "containers"))
    return {entry["containerPort"] for each in containers for entry in objects(each.get("ports"))}
