"""What a replica tells of itself while it leads is over when it follows."""

import re

from kvrouter.kube.client import ClusterLost
from kvrouter.kube.objects import Key, ResourceKind
from kvrouter.operator.api.status import Condition, ConditionStatus
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, NODES
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth

GONE = ClusterLost("GET /x: connection refused")
NAME = "kvrouter_operator_"


def lost(observed: OperatorInstrumentation) -> dict[str, float]:
    page = observed.telemetry.render().decode()
    found = re.findall(rf'^{NAME}watches_lost{{kind="(\w+)"}} (\S+)', page, re.MULTILINE)
    return {kind: float(value) for kind, value in found}


def of(observed: OperatorInstrumentation, gauge: str) -> float:
    page = observed.telemetry.render().decode()
    found = re.search(rf"^{NAME}{gauge} (\S+)", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_lost_watches_of_a_leader_are_cleared_when_it_follows() -> None:
    observed = OperatorInstrumentation(ReplicaHealth())
    observed.leads("one")
    for kind in (NODES, DEPLOYMENTS_OF_GRAPHS):
        observed.lost(kind, GONE)
    observed.lost_at_admission(DEPLOYMENTS_OF_GRAPHS, GONE)
    observed.waiting(7)
    observed.stood_back(Key("team", "llm"), "two/kvrouter-operator")
    assert lost(observed) == {"Node": 1.0, "DynamoGraphDeployment": 1.0}
    assert (of(observed, "waiting"), of(observed, "stood_back"), of(observed, "leading")) == (7.0, 1.0, 1.0)
    observed.follows("one", "the lease could not be renewed")
    assert lost(observed) == {"Node": 0.0, "DynamoGraphDeployment": 1.0}
    assert (of(observed, "waiting"), of(observed, "stood_back"), of(observed, "leading")) == (0.0, 0.0, 0.0)
    observed.lost_at_admission(DEPLOYMENTS_OF_GRAPHS, None)
    assert lost(observed) == {"Node": 0.0, "DynamoGraphDeployment": 0.0}


def test_kind_is_lost_while_controller_or_admission_cannot_watch_it() -> None:
    observed = OperatorInstrumentation(ReplicaHealth())
    other = ResourceKind("v1", "Other", "others")
    for reported, expected in (
        ((observed.lost, GONE), 1.0),
        ((observed.lost_at_admission, GONE), 1.0),
        ((observed.lost, None), 1.0),
        ((observed.lost_at_admission, None), 0.0),
    ):
        tell, error = reported
        tell(other, error)
        assert lost(observed) == {"Other": expected}


def conditions(observed: OperatorInstrumentation) -> dict[str, float]:
    page = observed.telemetry.render().decode()
    found = re.findall(rf"^{NAME}deployment_condition{{(.*)}} (\S+)", page, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def condition(kind: str, status: ConditionStatus) -> Condition:
    return Condition(
        type=kind, status=status, reason="X", message="x", last_transition_time="2026-01-01T00:00:00Z"
    )


def test_condition_metric_has_the_current_status_until_its_deployment_is_gone() -> None:
    observed = OperatorInstrumentation(ReplicaHealth())
    one, two = Key("team", "llm"), Key("team", "other")
    ready = 'condition="Ready",deployment="llm",namespace="team",status='
    observed.conditions_are(two, [condition("Available", ConditionStatus.TRUE)])
    available = 'condition="Available",deployment="other",namespace="team",status="true"'
    for status in ConditionStatus:
        observed.conditions_are(one, [condition("Ready", status)])
        shown = conditions(observed)
        assert {_sorted(labels): value for labels, value in shown.items()} == {
            f'{ready}"{status.value.lower()}"': 1.0,
            available: 1.0,
        }
    observed.conditions_are(one, ())
    assert [_sorted(labels) for labels in conditions(observed)] == [available]
    observed.follows("one", "the lease could not be renewed")
    assert conditions(observed) == {}


def _sorted(labels: str) -> str:
    return ",".join(sorted(labels.split(",")))
