"""What workers' pods are asked: whether they take requests, where kvrouter knows how to ask."""

from pydantic import JsonValue

from kvrouter.operator.plan.serving import HEALTH_PORT
from tests.support.deployments import at, deployment, environment, has, planned, templates


def test_workers_of_kvrouters_own_image_are_ready_when_they_take_requests() -> None:
    of_kvrouter: JsonValue = {"name": "main", "args": ["worker", "vllm", "--url", "http://localhost:8000"]}
    engine: JsonValue = {"name": "engine", "image": "vllm"}
    tool: JsonValue = {"name": "tool", "args": ["topology", "check"]}
    containers: JsonValue = [engine, of_kvrouter, tool]
    template = templates(planned(deployment(pods={"worker": {"spec": {"containers": containers}}})))["worker"]
    port = HEALTH_PORT + 1
    assert environment(template, 1)["KVROUTER_HEALTH_PORT"] == str(port)
    for probe, path in (("startup", "/health"), ("readiness", "/accepting"), ("liveness", "/health")):
        asked = at(template, "spec", "containers", 1, f"{probe}Probe", "httpGet")
        assert asked == {"path": path, "port": port}
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
