"""What a replica tells of itself while it leads is over when it follows."""

import re

from kvrouter.kube.client import ClusterLost
from kvrouter.kube.objects import Key, ResourceKind
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


def test_what_a_leader_could_not_watch_is_no_loss_once_it_follows() -> None:
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


def test_a_kind_is_lost_while_either_cannot_watch_it() -> None:
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
