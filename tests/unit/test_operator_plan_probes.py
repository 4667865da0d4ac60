"""What workers' pods are asked: whether they take requests, where kvrouter knows how to ask."""

from pydantic import JsonValue

from kvrouter.operator.plan.manifest import Manifest, objects
from kvrouter.operator.plan.serving import HEALTH_PORT
from tests.support.deployments import at, deployment, has, planned, templates


def test_workers_are_ready_when_they_take_requests_and_nobody_else_is_asked() -> None:
    of_kvrouter: JsonValue = {"name": "main", "args": ["worker", "vllm", "--url", "http://localhost:8000"]}
    engine: JsonValue = {"name": "engine", "image": "vllm", "args": ["worker"]}
    tool: JsonValue = {"name": "tool", "args": ["topology", "check"]}
    own_image: Manifest = {"name": "mine", "image": "mine", "command": ["kvrouter", "worker", "mock"]}
    beside: JsonValue = {**own_image, "name": "beside", "restartPolicy": "Always"}
    spec: JsonValue = {"containers": [engine, of_kvrouter, tool, own_image], "initContainers": [beside]}
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
