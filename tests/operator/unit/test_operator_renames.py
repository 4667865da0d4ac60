"""Which components stay for a while though they are planned no more."""

from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from kvrouter.kube.objects import Manifest
from kvrouter.operator.api.deployment import API_VERSION, KIND, read_deployment
from kvrouter.operator.reconcile.renames import Held, held_components

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
HOLD_S = 600.0
NOBODY = Held(frozenset(), None)


def workload(
    component: str, role: str = "decode", *, ready: int = 3, age_s: float = 10_000.0, seen: int = 1
) -> Manifest:
    labels: JsonValue = {"kvrouter.dev/component": component, "kvrouter.dev/component-type": role}
    created = (NOW - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {
            "name": f"llm-{component}",
            "namespace": "team",
            "labels": labels,
            "creationTimestamp": created,
            "generation": 1,
        },
        "spec": {"replicas": 3},
        "status": {"observedGeneration": seen, "readyReplicas": ready, "updatedReplicas": ready},
    }


def held(*there: Manifest, has: str = "new", role: str = "decode") -> Held:
    """What stays of ``there`` in a deployment that has this component with three pods, and no other."""
    component: JsonValue = {"name": has, "type": role, "replicas": 3}
    fleet = {"metadata": {"name": "llm", "namespace": "team"}, "spec": {"components": [component]}}
    deployment = read_deployment({"apiVersion": API_VERSION, "kind": KIND, **fleet}).deployment
    assert deployment is not None
    return held_components(deployment, there, NOW, HOLD_S)


def test_old_component_stays_until_its_replacement_is_ready() -> None:
    old = workload("decode")
    assert held(old) == Held(frozenset({"decode"}), HOLD_S)
    for new in (workload("new", ready=2, age_s=100.0), workload("new", ready=3, age_s=100.0, seen=0)):
        assert held(old, new) == Held(frozenset({"decode"}), HOLD_S - 100.0)
    assert held(old, workload("new", age_s=100.0)) == NOBODY


def test_old_component_is_not_held_for_another_role_or_after_the_limit() -> None:
    old = workload("decode")
    assert held(old, role="prefill") == NOBODY
    assert held(old, workload("new", "prefill", ready=0, age_s=1.0), role="prefill") == NOBODY
    assert held(old, workload("new", ready=0, age_s=HOLD_S + 1.0)) == NOBODY


def test_workload_without_labels_is_not_held() -> None:
    bare: Manifest = {"metadata": {"name": "llm-decode", "namespace": "team"}}
    assert held(bare) == NOBODY
