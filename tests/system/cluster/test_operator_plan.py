"""What is planned, in a real cluster: taken as it is, settled, and rolled only where a change concerns it."""

from pydantic import JsonValue

from kvrouter.operator.plan.plan import plan
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import WAIT
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment

REQUIRED: dict[str, JsonValue] = {"labelKey": "topology.kubernetes.io/zone", "domain": "zone"}
PREFERRED: dict[str, JsonValue] = {**REQUIRED, "enforcement": "preferred", "preferredWeight": 0.5}


def test_a_reapplied_plan_changes_nothing_and_a_new_policy_rolls_some(
    plane: ControlPlane, namespace: str
) -> None:
    first = _applied(plane, namespace, REQUIRED)
    plane.kubectl("wait", "--for=condition=Available", "deployments", "--all", *_in(namespace), WAIT)
    assert _applied(plane, namespace, REQUIRED) == first == dict.fromkeys(first, 1)
    changed = _applied(plane, namespace, PREFERRED)
    assert changed == {"llm-frontend": 2, "llm-prefill": 2, "llm-worker": 2, "llm-decode": 1}


def test_the_service_selects_the_frontend_pods(plane: ControlPlane, namespace: str) -> None:
    _applied(plane, namespace, None)
    plane.kubectl("rollout", "status", "deployment/llm-frontend", *_in(namespace), WAIT)
    selector = plane.read("service", "llm-frontend", *_in(namespace))["spec"]["selector"]
    query = ",".join(f"{key}={value}" for key, value in selector.items())
    found = plane.read("pods", "--selector", query, *_in(namespace))["items"]
    assert [pod["metadata"]["labels"]["kvrouter.dev/component"] for pod in found] == ["frontend"]


def _in(namespace: str) -> tuple[str, str]:
    return ("--namespace", namespace)


def _applied(plane: ControlPlane, namespace: str, policy: dict[str, JsonValue] | None) -> dict[str, int]:
    """Apply the plan under this policy; answers with how often each Deployment was changed so far."""
    of = deployment(policy=policy)
    of = of.model_copy(
        update={"metadata": of.metadata.model_copy(update={"namespace": namespace, "uid": ""})}
    )
    plane.apply(*plan(of, FACTS, DEFAULTS).manifests)
    found = plane.read("deployments", *_in(namespace))["items"]
    return {entry["metadata"]["name"]: entry["metadata"]["generation"] for entry in found}
