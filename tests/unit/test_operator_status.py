"""What is told of a deployment: conditions with their reasons and mends, domains, columns, events."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import JsonValue

from kvrouter.config.problems import Problem
from kvrouter.operator.api import (
    ComponentStatus,
    Condition,
    ConditionStatus,
    DeploymentStatus,
    DomainStatus,
    DynamoGraphDeployment,
)
from kvrouter.operator.facts import ClusterFacts, Grove
from kvrouter.operator.labels import Pod
from kvrouter.operator.plan import plan
from kvrouter.operator.status import (
    Event,
    EventType,
    balance_of,
    component_status,
    deployment_status,
    events_of,
    unreadable_status,
)
from tests.support.deployments import DEFAULTS, FACTS, deployment

TYPES = ("frontend", "prefill", "decode")
NOW = datetime(2026, 11, 21, 21, 0, 0, tzinfo=UTC)
REQUIRED: dict[str, JsonValue] = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def worker(
    kind: str,
    zone: str | None,
    number: int = 0,
    *,
    ready: bool = True,
    over: bool = False,
    stuck: bool = False,
) -> Pod:
    labels = {"kvrouter.dev/component-type": kind}
    if zone is not None:
        labels["grove.io/topology.zone"] = zone
    node = f"node-{zone or 'x'}"
    return Pod(
        f"{kind}-{zone}-{number}", "fleet", "u", node, labels, is_ready=ready, is_over=over, is_stuck=stuck
    )


def pods(**domains: tuple[int, int]) -> list[Pod]:
    """Ready pods by domain: so many prefill, so many decode workers."""
    return [
        worker(kind, zone, number)
        for zone, counts in domains.items()
        for kind, count in zip(("prefill", "decode"), counts, strict=True)
        for number in range(count)
    ]


def settled(of: DynamoGraphDeployment) -> list[ComponentStatus]:
    return [
        ComponentStatus(
            name=component.name,
            type=component.type.value,
            replicas=component.replicas,
            ready_replicas=component.replicas,
            updated_replicas=component.replicas,
        )
        for component in of.spec.components
    ]


def status(
    found: list[Pod],
    *,
    of: DynamoGraphDeployment | None = None,
    policy: dict[str, JsonValue] | None = REQUIRED,
    facts: ClusterFacts = FACTS,
    previous: DeploymentStatus | None = None,
    now: datetime = NOW,
) -> DeploymentStatus:
    of = of or deployment(policy=policy, types=TYPES)
    return deployment_status(
        of,
        plan(of, facts, DEFAULTS),
        facts,
        components=settled(of),
        pods=found,
        previous=previous,
        now=now,
    )


def condition(found: DeploymentStatus, kind: str) -> Condition:
    return next(condition for condition in found.conditions if condition.type == kind)


def said(found: DeploymentStatus, kind: str) -> tuple[ConditionStatus, str]:
    told = condition(found, kind)
    return told.status, told.reason


# DomainBalanced, and what columns show.


def test_every_domain_with_prefill_has_decode() -> None:
    found = status(pods(a=(2, 3), b=(1, 1)))
    assert said(found, "DomainBalanced") == (TRUE, "DomainsBalanced")
    assert found.balance == "a 2/3, b 1/1"
    assert found.domains == (
        DomainStatus(value="a", prefill=2, decode=3),
        DomainStatus(value="b", prefill=1, decode=1),
    )


@pytest.mark.parametrize(
    ("more", "consequence"),
    [
        ({}, "Requests go to prefill workers of other domains, and get 503 while there are none."),
        ({"enforcement": "fallback"}, "Their KV leaves its zone."),
        ({"enforcement": "preferred", "preferredWeight": 0.5}, "Their KV leaves its zone."),
    ],
)
def test_a_domain_without_decode_is_told_with_what_follows_and_comes_first(
    more: dict[str, JsonValue], consequence: str
) -> None:
    found = status(pods(a=(2, 3), b=(4, 0), c=(0, 1)), policy={**REQUIRED, **more})
    assert said(found, "DomainBalanced") == (FALSE, "DomainWithoutDecode")
    assert condition(found, "DomainBalanced").message == (
        f"zone b: prefill workers, and no Ready decode worker. {consequence} "
        "Let decode workers be scheduled there, or take the prefill workers away."
    )
    assert found.balance == "b 4/0, a 2/3, c 0/1"


def test_pods_that_are_not_ready_or_are_leaving_do_not_count() -> None:
    gone = [worker("decode", "a", 8, ready=False, stuck=True), worker("decode", "a", 9, over=True)]
    assert said(status([*pods(a=(1, 0)), *gone]), "DomainBalanced") == (FALSE, "DomainWithoutDecode")


STARTS = worker("decode", "a", 8, ready=False)
PREFILLS = worker("prefill", "a")
DECODES = worker("decode", "a")
ELSEWHERE = worker("decode", "b")
PENDING = Pod("decode-9", labels={"kvrouter.dev/component-type": "decode"})


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        # At a start: pods are created, bound, labelled and Ready in any order.
        ([[PREFILLS]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, PENDING]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, worker("decode", None, ready=False)]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, STARTS]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, STARTS], [PREFILLS, STARTS]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, STARTS], [PREFILLS, DECODES]], (TRUE, "DomainsBalanced")),
        # Nobody starts there.
        ([[PREFILLS, ELSEWHERE]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, worker("decode", "b", ready=False)]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, worker("decode", "", ready=False)]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, worker("decode", "a", ready=False, stuck=True)]], (FALSE, "DomainWithoutDecode")),
        # A domain that had decode workers loses them, whoever starts in their place.
        ([[PREFILLS, DECODES], [PREFILLS, STARTS]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, DECODES], [PREFILLS]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, DECODES], [PREFILLS], [PREFILLS, STARTS]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, DECODES], [PREFILLS, STARTS], [PREFILLS, DECODES]], (TRUE, "DomainsBalanced")),
        # One without anybody, and one that starts.
        ([[PREFILLS, STARTS, worker("prefill", "b")]], (FALSE, "DomainWithoutDecode")),
    ],
)
def test_a_domain_that_starts_is_not_told_to_lack_what_it_never_had(
    steps: list[list[Pod]], told: tuple[ConditionStatus, str]
) -> None:
    found: DeploymentStatus | None = None
    for pods_there in steps:
        found = status(pods_there, previous=found)
    assert found is not None
    assert said(found, "DomainBalanced") == told
    if told == (UNKNOWN, "DecodeStarting"):
        assert told[1] not in [event.reason for event in events_of(None, found)]


def test_a_domain_that_starts_is_named_alone() -> None:
    message = condition(status([PREFILLS, STARTS, worker("prefill", "b")]), "DomainBalanced").message
    assert message.startswith("zone b: prefill workers, and no Ready decode worker.")


def test_what_was_known_of_another_domain_does_not_count() -> None:
    racks = {**REQUIRED, "domain": "rack"}
    labels = {"grove.io/topology.rack": "a"}
    prefill, decode = (
        Pod(f"{kind}-r", labels={"kvrouter.dev/component-type": kind, **labels}, is_ready=kind == "prefill")
        for kind in ("prefill", "decode")
    )
    before = status([PREFILLS, DECODES])
    assert said(status([prefill, decode], policy=racks, previous=before), "DomainBalanced") == (
        UNKNOWN,
        "DecodeStarting",
    )


def test_aggregated_workers_take_decode_legs() -> None:
    assert status([*pods(a=(1, 0)), worker("worker", "a")]).balance == "a 1/1"


def test_workers_whose_place_is_unknown_are_named() -> None:
    found = status([*pods(a=(1, 1)), worker("decode", "", 5)])
    assert condition(found, "DomainBalanced").message.endswith(
        ". The place of 1 Ready workers is unknown: decode--5"
    )


def test_idle_decode_workers_are_told_where_kv_cannot_come_to_them() -> None:
    assert "Decode workers of c" in condition(status(pods(a=(1, 1), c=(0, 2))), "DomainBalanced").message


def test_before_prefill_workers_are_ready_nothing_is_known() -> None:
    assert said(status([]), "DomainBalanced") == (UNKNOWN, "NoReadyPrefill")


def test_a_fleet_without_prefill_is_always_balanced() -> None:
    of = deployment(policy=REQUIRED, types=("frontend", "worker"))
    assert said(status([worker("worker", "a")], of=of), "DomainBalanced") == (TRUE, "NotDisaggregated")


def test_a_column_shows_as_many_domains_as_fit() -> None:
    domains = [DomainStatus(value=f"zone-{number:03}", prefill=1, decode=1) for number in range(300)]
    text = balance_of(domains)
    assert text is not None
    assert len(text) <= 256
    assert text.endswith(" more")
    assert balance_of(()) is None
    many = status(pods(**{f"zone{number}": (1, 1) for number in range(300)}))
    assert len(many.domains) == 256


# TopologyResolved.


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (ClusterFacts(), (FALSE, "GroveAbsent")),
        (ClusterFacts(grove=Grove.PRESENT), (FALSE, "TopologyNotFound")),
        (ClusterFacts(grove=Grove.UNREAD), (UNKNOWN, "TopologyUnread")),
        (FACTS, (TRUE, "AllWorkersPlaced")),
    ],
)
def test_a_topology_that_is_not_there_is_told(facts: ClusterFacts, told: tuple[ConditionStatus, str]) -> None:
    assert said(status(pods(a=(1, 1)), facts=facts), "TopologyResolved") == told


def test_a_level_that_is_not_there_is_told() -> None:
    found = status([], policy={**REQUIRED, "domain": "block"})
    assert said(found, "TopologyResolved") == (FALSE, "LevelNotFound")


def test_nodes_without_the_label_are_named_with_the_mend() -> None:
    found = status([*pods(a=(1, 1)), worker("decode", "", ready=False)])
    assert said(found, "TopologyResolved") == (FALSE, "NodeLabelMissing")
    message = condition(found, "TopologyResolved").message
    assert message.startswith("nodes without the label topology.kubernetes.io/zone: node-x. ")
    assert "kubectl label node NODE topology.kubernetes.io/zone=VALUE" in message


def test_labels_that_nobody_copied_are_told_apart_from_nodes_without_them() -> None:
    found = status([worker("decode", None, ready=False)])
    assert said(found, "TopologyResolved") == (FALSE, "LabelsNotCopied")


def test_an_operator_that_cannot_read_nodes_or_topologies_says_why() -> None:
    facts = replace(FACTS, nodes_unread_because="nodes is forbidden")
    message = condition(
        status([worker("decode", None, ready=False)], facts=facts), "TopologyResolved"
    ).message
    assert "The operator cannot read nodes (nodes is forbidden): let it have the role for nodes" in message
    assert said(status(pods(a=(1, 1)), facts=facts), "TopologyResolved") == (TRUE, "AllWorkersPlaced")
    unread = ClusterFacts(grove=Grove.UNREAD, unread_because="grove.io is forbidden")
    assert "(grove.io is forbidden)" in condition(status([], facts=unread), "TopologyResolved").message


def test_before_a_worker_is_bound_nothing_is_known() -> None:
    unbound = Pod("p", labels={"kvrouter.dev/component-type": "decode"})
    assert said(status([unbound]), "TopologyResolved") == (UNKNOWN, "NoPodsBound")


# Ready.


def test_all_pods_ready() -> None:
    found = status(pods(a=(1, 1)))
    assert said(found, "Ready") == (TRUE, "AllPodsReady")
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
def test_ready_follows_the_deployments_of_the_cluster(workload: Mapping[str, object], reason: str) -> None:
    of = deployment(types=("frontend",))
    found = deployment_status(
        of,
        plan(of, FACTS, DEFAULTS),
        FACTS,
        components=[component_status(of.spec.components[0], workload)],
        pods=[],
        previous=None,
        now=NOW,
    )
    assert condition(found, "Ready").reason == reason


def test_what_is_not_in_the_cluster_is_not_ready() -> None:
    of = deployment(types=("frontend", "worker"))
    planned = plan(of, FACTS, DEFAULTS)
    found = deployment_status(of, planned, FACTS, components=settled(of)[:1], pods=[], previous=None, now=NOW)
    assert said(found, "Ready") == (FALSE, "NotApplied")


def test_a_spec_that_cannot_be_planned_names_the_field() -> None:
    of = deployment(pods={"decode": {"spec": {"containers": [{"name": "main"}]}}}, types=TYPES)
    found = status([], of=of)
    assert said(found, "Ready") == (FALSE, "SpecInvalid")
    assert "spec.components[2].podTemplate.spec.containers[0]" in condition(found, "Ready").message


def test_what_cannot_be_read_is_not_ready_and_stays_known_for_what_it_was() -> None:
    before = status(pods(a=(1, 1)))
    problems = (Problem(("spec", "components", 0, "type"), "must be frontend, prefill, decode or worker"),)
    found = unreadable_status(7, problems, previous=before, now=NOW + timedelta(hours=1))
    assert said(found, "Ready") == (FALSE, "SpecInvalid")
    assert "spec.components[0].type must be frontend" in condition(found, "Ready").message
    assert condition(found, "Ready").observed_generation == found.observed_generation == 7
    assert found.components == before.components
    assert condition(found, "DomainBalanced") == condition(before, "DomainBalanced")
    assert [event.reason for event in events_of(before, found)] == ["SpecInvalid"]
    again = unreadable_status(7, problems, previous=found, now=NOW + timedelta(hours=2))
    assert again == found
    alone = unreadable_status(1, problems, previous=None, now=NOW)
    assert [each.type for each in alone.conditions] == ["Ready"]


# Without a policy; times; events.


def test_without_a_policy_there_is_ready_alone() -> None:
    found = status(pods(a=(1, 1)), policy=None)
    assert [condition.type for condition in found.conditions] == ["Ready"]
    assert (found.policy, found.balance, found.domains) == (None, None, ())


def test_the_policy_in_force_is_told_however_it_was_spelt() -> None:
    policy = status([]).policy
    assert policy is not None
    assert (policy.domain, policy.enforcement, policy.cluster_topology_name) == (
        "zone",
        "required",
        "gpu-fabric",
    )


def test_a_time_is_that_of_the_last_change_of_status() -> None:
    first = status(pods(a=(1, 0)))
    assert condition(first, "DomainBalanced").last_transition_time == "2026-11-21T21:00:00Z"
    elsewhere = (NOW + timedelta(hours=1)).astimezone(timezone(timedelta(hours=3)))
    second = status(pods(a=(2, 0)), previous=first, now=elsewhere)
    assert condition(second, "DomainBalanced").last_transition_time == "2026-11-21T21:00:00Z"
    third = status(pods(a=(2, 1)), previous=second, now=elsewhere)
    assert condition(third, "DomainBalanced").last_transition_time == "2026-11-21T22:00:00Z"
    assert condition(third, "Ready").last_transition_time == "2026-11-21T21:00:00Z"


def test_events_tell_what_became_otherwise_and_only_that() -> None:
    good = status(pods(a=(1, 1)))
    bad = status(pods(a=(1, 0)), previous=good)
    note = condition(bad, "DomainBalanced").message
    assert events_of(None, good) == ()
    assert events_of(good, bad) == (Event(EventType.WARNING, "DomainWithoutDecode", note),)
    assert events_of(bad, status(pods(a=(2, 0)), previous=bad)) == ()
    assert [(event.type, event.reason) for event in events_of(bad, good)] == [
        (EventType.NORMAL, "DomainsBalanced")
    ]
    assert events_of(good, status([])) == ()
