"""What is reported of a deployment: conditions with their reasons and fixes, events."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta, timezone

import pytest

from kvrouter.operator.api.status import ConditionStatus, DeploymentStatus
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.plan import plan
from kvrouter.operator.status.finding import ConditionEvent, EventType, events_of
from kvrouter.operator.status.resolved import RefusedObjects, component_status, refused_pods
from kvrouter.operator.status.status import deployment_status, unreadable_status
from kvrouter.settings.problems import Problem
from tests.testing.deployment_statuses import (
    FALSE,
    NOW,
    REQUIRED,
    SERVING,
    TRUE,
    TYPES,
    UNKNOWN,
    condition,
    pods,
    settled,
    status,
    status_and_reason,
    worker,
)
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment

# TopologyResolved.


@pytest.mark.parametrize(
    ("cluster_info", "reported"),
    [
        (ClusterInfo(), (FALSE, "GroveAbsent")),
        (ClusterInfo(grove=Grove.PRESENT), (FALSE, "TopologyNotFound")),
        (ClusterInfo(grove=Grove.UNREAD), (UNKNOWN, "TopologyUnread")),
        (FACTS, (TRUE, "AllWorkersPlaced")),
    ],
)
def test_missing_or_unread_topology_is_reported_in_topology_resolved(
    cluster_info: ClusterInfo, reported: tuple[ConditionStatus, str]
) -> None:
    assert (
        status_and_reason(status(pods(a=(1, 1)), cluster_info=cluster_info), "TopologyResolved") == reported
    )


def test_level_missing_from_the_topology_is_reported() -> None:
    found = status([], policy={**REQUIRED, "domain": "block"})
    assert status_and_reason(found, "TopologyResolved") == (FALSE, "LevelNotFound")


def test_nodes_without_the_label_are_named_with_the_fix() -> None:
    found = status([*pods(a=(1, 1)), worker("decode", "", ready=False)])
    assert status_and_reason(found, "TopologyResolved") == (FALSE, "NodeLabelMissing")
    message = condition(found, "TopologyResolved").message
    assert message.startswith("nodes without the label topology.kubernetes.io/zone: node-x. ")
    assert "kubectl label node NODE topology.kubernetes.io/zone=VALUE" in message


def test_uncopied_labels_are_reported_apart_from_unlabelled_nodes() -> None:
    found = status([worker("decode", None, ready=False)])
    assert status_and_reason(found, "TopologyResolved") == (FALSE, "LabelsNotCopied")


def test_status_gives_the_reason_why_nodes_or_topologies_cannot_be_read() -> None:
    cluster_info = replace(FACTS, nodes_unread_because="nodes is forbidden")
    message = condition(
        status([worker("decode", None, ready=False)], cluster_info=cluster_info), "TopologyResolved"
    ).message
    assert "The operator cannot read nodes (nodes is forbidden): let it have the role for nodes" in message
    assert status_and_reason(status(pods(a=(1, 1)), cluster_info=cluster_info), "TopologyResolved") == (
        TRUE,
        "AllWorkersPlaced",
    )
    unread = ClusterInfo(grove=Grove.UNREAD, unread_because="grove.io is forbidden")
    assert "(grove.io is forbidden)" in condition(status([], cluster_info=unread), "TopologyResolved").message


def test_topology_resolved_is_unknown_before_a_worker_is_bound() -> None:
    unbound = Pod("p", labels={"kvrouter.dev/component-type": "decode"})
    assert status_and_reason(status([unbound]), "TopologyResolved") == (UNKNOWN, "NoPodsBound")


# Ready.


def test_deployment_is_ready_when_all_pods_are_ready() -> None:
    found = status(pods(a=(1, 1)))
    assert status_and_reason(found, "Ready") == (TRUE, "AllPodsReady")
    assert [component.name for component in found.components] == list(TYPES)


def of_cluster(**counts: int) -> Mapping[str, object]:
    generation = counts.pop("generation", 1)
    return {"metadata": {"generation": generation}, "status": {"observedGeneration": 1, **counts}}


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (of_cluster(replicas=1, readyReplicas=1, updatedReplicas=1), "AllPodsReady"),
        (of_cluster(replicas=1, updatedReplicas=1), "PodsNotReady"),
        (of_cluster(replicas=2, readyReplicas=2, updatedReplicas=1), "Updating"),
        (of_cluster(replicas=1, readyReplicas=1), "Updating"),
        (of_cluster(generation=2, replicas=1, readyReplicas=1, updatedReplicas=1), "Updating"),
    ],
)
def test_ready_reason_follows_the_replicas_of_the_kubernetes_deployment(
    workload: Mapping[str, object], reason: str
) -> None:
    of = deployment(types=("frontend",))
    found = deployment_status(
        of,
        plan(of, FACTS, DEFAULTS),
        FACTS,
        components=[component_status(of.spec.components[0], workload)],
        pods=[],
        previous=None,
        now=NOW,
        workers=SERVING,
    )
    assert condition(found, "Ready").reason == reason


def test_component_missing_from_the_cluster_is_not_ready() -> None:
    of = deployment(types=("frontend", "worker"))
    planned = plan(of, FACTS, DEFAULTS)
    found = deployment_status(
        of,
        planned,
        FACTS,
        components=settled(of)[:1],
        pods=[],
        previous=None,
        now=NOW,
        workers=SERVING,
    )
    assert status_and_reason(found, "Ready") == (FALSE, "NotApplied")


def test_a_spec_that_cannot_be_planned_names_the_field() -> None:
    of = deployment(pods={"decode": {"spec": {"containers": [{"name": "main"}]}}}, types=TYPES)
    found = status([], of=of)
    assert status_and_reason(found, "Ready") == (FALSE, "SpecInvalid")
    assert "spec.components[2].podTemplate.spec.containers[0]" in condition(found, "Ready").message


def test_unreadable_spec_is_not_ready_and_keeps_the_former_status() -> None:
    before = status(pods(a=(1, 1)))
    problems = (Problem(("spec", "components", 0, "type"), "must be frontend, prefill, decode or worker"),)
    found = unreadable_status(7, problems, previous=before, now=NOW + timedelta(hours=1))
    assert status_and_reason(found, "Ready") == (FALSE, "SpecInvalid")
    assert "spec.components[0].type must be frontend" in condition(found, "Ready").message
    assert condition(found, "Ready").observed_generation == found.observed_generation == 7
    assert found.components == before.components
    assert condition(found, "DomainBalanced") == condition(before, "DomainBalanced")
    assert [event.reason for event in events_of(before, found)] == ["SpecInvalid"]
    again = unreadable_status(7, problems, previous=found, now=NOW + timedelta(hours=2))
    assert again == found
    alone = unreadable_status(1, problems, previous=None, now=NOW)
    assert [each.type for each in alone.conditions] == ["Ready", "Stalled"]


# What the API server refuses.

DECODE = "Deployment llm-decode: spec.template.spec.containers[0].ports[1].name: Duplicate value"


def refused(refusals: RefusedObjects, *, previous: DeploymentStatus | None = None) -> DeploymentStatus:
    return status(pods(a=(1, 1)), refusals=refusals, previous=previous)


def test_refused_write_is_reported_with_its_message_and_again_on_a_change() -> None:
    good = status(pods(a=(1, 1)))
    first = refused(RefusedObjects(writes=[DECODE]), previous=good)
    assert status_and_reason(first, "Ready") == (FALSE, "WriteRefused")
    assert DECODE in condition(first, "Ready").message
    assert [event.reason for event in events_of(good, first)] == ["WriteRefused"]
    assert events_of(first, refused(RefusedObjects(writes=[DECODE]), previous=first)) == ()
    other = refused(RefusedObjects(writes=["Service llm-frontend: exceeded quota: few"]), previous=first)
    assert [event.note for event in events_of(first, other)] == [condition(other, "Ready").message]
    many = condition(refused(RefusedObjects(writes=["x" * 10_000] * 40)), "Ready").message
    assert len(many) < 10_000
    assert "and 35 more" in many


def test_taken_name_is_reported_unless_a_write_is_refused() -> None:
    taken = RefusedObjects(taken=["Service llm-frontend"])
    assert status_and_reason(refused(taken), "Ready") == (FALSE, "NameTaken")
    both = replace(taken, writes=[DECODE])
    assert status_and_reason(refused(both), "Ready") == (FALSE, "WriteRefused")


def test_refused_pods_are_reported_while_pods_are_missing() -> None:
    of = deployment(types=("frontend",))
    words = 'pods "llm-frontend-x" is forbidden: exceeded quota: few'
    failure = {"type": "ReplicaFailure", "status": "True", "message": words}
    component = of.spec.components[0]
    reported = refused_pods(component, {"status": {"conditions": [failure]}})
    assert reported == f"frontend: {words}"
    assert refused_pods(component, {"status": {"conditions": [{**failure, "status": "False"}]}}) is None
    assert refused_pods(component, None) is None
    for workload, reason in (
        (of_cluster(), "PodsRefused"),
        (of_cluster(replicas=1, updatedReplicas=1), "PodsRefused"),
        (of_cluster(replicas=1, readyReplicas=1, updatedReplicas=1), "AllPodsReady"),
    ):
        found = deployment_status(
            of,
            plan(of, FACTS, DEFAULTS),
            FACTS,
            components=[component_status(component, workload)],
            pods=[],
            previous=None,
            now=NOW,
            workers=SERVING,
            refusals=RefusedObjects(pods=[reported]),
        )
        assert condition(found, "Ready").reason == reason


def test_labels_that_the_server_refuses_are_reported() -> None:
    pod = worker("decode", None, ready=False)
    found = status([pod], refusals=RefusedObjects(labels=[f"Pod {pod.name}: denied by the policy engine"]))
    assert status_and_reason(found, "TopologyResolved") == (FALSE, "LabelsNotCopied")
    assert "denied by the policy engine" in condition(found, "TopologyResolved").message


# Without a policy; times; events.


def test_status_without_a_policy_has_ready_and_available_alone() -> None:
    found = status(pods(a=(1, 1)), policy=None)
    assert [condition.type for condition in found.conditions] == ["Ready", "Available"]
    assert (found.policy, found.balance, found.domains) == (None, None, ())


def test_policy_in_force_is_in_the_status() -> None:
    policy = status([]).policy
    assert policy is not None
    assert (policy.domain, policy.enforcement, policy.cluster_topology_name) == (
        "zone",
        "required",
        "gpu-fabric",
    )


def test_transition_time_is_that_of_the_last_status_change() -> None:
    first = status(pods(a=(1, 0)))
    assert condition(first, "DomainBalanced").last_transition_time == "2026-11-21T21:00:00Z"
    elsewhere = (NOW + timedelta(hours=1)).astimezone(timezone(timedelta(hours=3)))
    second = status(pods(a=(2, 0)), previous=first, now=elsewhere)
    assert condition(second, "DomainBalanced").last_transition_time == "2026-11-21T21:00:00Z"
    third = status(pods(a=(2, 1)), previous=second, now=elsewhere)
    assert condition(third, "DomainBalanced").last_transition_time == "2026-11-21T22:00:00Z"
    assert condition(third, "Ready").last_transition_time == "2026-11-21T21:00:00Z"


def test_events_are_made_only_for_changed_conditions() -> None:
    good = status(pods(a=(1, 1)))
    bad = status(pods(a=(1, 0)), previous=good)
    note = condition(bad, "DomainBalanced").message
    assert events_of(None, good) == ()
    assert events_of(good, bad) == (ConditionEvent(EventType.WARNING, "DomainWithoutDecode", note),)
    assert events_of(bad, status(pods(a=(2, 0)), previous=bad)) == ()
    assert [(event.type, event.reason) for event in events_of(bad, good)] == [
        (EventType.NORMAL, "DomainsBalanced")
    ]
    assert events_of(good, status([])) == ()
