"""Which workers an upgrade by domain replaces next, and what it waits for."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import JsonValue

from kvrouter.core.workers import KvFormat, Role
from kvrouter.kube.objects import Manifest
from kvrouter.operator.api.deployment import read_deployment
from kvrouter.operator.api.status import ConditionStatus
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.manifest import TEMPLATE_HASH
from kvrouter.operator.plan.plan import Plan, plan
from kvrouter.operator.plan.workload import pods_at_a_time
from kvrouter.operator.reconcile.upgrades import (
    LEAVES_FIRST,
    LOOK_AGAIN_S,
    Serving,
    Upgrade,
    WorkerGroup,
    next_step,
)
from kvrouter.operator.status.available import Registered
from kvrouter.settings.problems import dotted
from tests.testing.planned_deployments import DEFAULTS, FACTS, at, deployment, has, of_kind

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
ZONE = "topology.kubernetes.io/zone"
WARM_UP_S, DEADLINE_S = 60.0, 600.0
SERVED = Serving()
COMPONENTS = {each.name: each for each in deployment().spec.components}
ENGINE: dict[str, JsonValue] = {"spec": {"containers": [{"name": "main", "image": "example.com/engine:1"}]}}


def worker(
    name: str,
    zone: str = "a",
    *,
    ready_s: float | None = 1000.0,
    age_s: float = 2000.0,
    is_failing: bool = False,
    leaves: bool = False,
) -> Pod:
    """A worker that has been Ready for so long; with None it was never Ready."""
    return Pod(
        name,
        labels={ZONE: zone},
        is_ready=ready_s is not None,
        is_failing=is_failing,
        created=(NOW - timedelta(seconds=age_s)).isoformat(),
        ready_since="" if ready_s is None else (NOW - timedelta(seconds=ready_s)).isoformat(),
        deletion_cost=LEAVES_FIRST if leaves else None,
    )


def group(
    name: str,
    old: Sequence[Pod] = (),
    new: Sequence[Pod] = (),
    *,
    replicas: int | None = None,
    paused: bool = True,
    written: bool = True,
    younger: Sequence[Pod] = (),
) -> WorkerGroup:
    """The workers of a component: all that there should be, unless ``replicas`` says so. ``younger`` are old
    ones of another ReplicaSet.
    """
    count = len(old) + len(younger) + len(new) if replicas is None else replicas
    spec: JsonValue = {"replicas": count, "paused": paused}
    hashed: Manifest = {"annotations": {TEMPLATE_HASH: "new"}}
    current: Manifest = hashed if written else {"annotations": {TEMPLATE_HASH: "old"}}
    return WorkerGroup(
        COMPONENTS[name],
        {"metadata": hashed, "spec": {"replicas": count}},
        {"metadata": current, "spec": spec},
        [each for each in (old, younger) if each],
        new,
        WARM_UP_S,
        DEADLINE_S,
    )


def step(*groups: WorkerGroup, serves: Serving = SERVED) -> Upgrade:
    return next_step(groups, "zone", ZONE, serves, NOW)


def replaced(found: Upgrade) -> dict[str, JsonValue]:
    """How many workers each Deployment may replace; 0 while it is paused."""
    specs = {name: at(each, "spec") for name, each in found.workloads.items()}
    return {
        name: 0 if has(spec, "paused") else at(spec, "strategy", "rollingUpdate", "maxUnavailable")
        for name, spec in specs.items()
    }


def outcome(found: Upgrade) -> tuple[ConditionStatus, str]:
    assert found.finding is not None
    return found.finding.status, found.finding.reason


def test_without_old_workers_nothing_is_staged_and_costs_are_removed() -> None:
    kept = worker("d-1", leaves=True)
    assert step(group("decode", (), [kept, worker("d-2")])) == Upgrade(costs=[(kept, None)])


def test_a_batch_has_prefill_and_decode_workers_of_the_first_zone() -> None:
    prefill = [worker("p-1", "b"), worker("p-2", "a")]
    decode = [worker("d-1", "a"), worker("d-2", "b")]
    found = step(group("prefill", prefill), group("decode", decode))
    assert found.costs == [(prefill[1], LEAVES_FIRST), (decode[0], LEAVES_FIRST)]
    assert replaced(found) == {"prefill": 0, "decode": 0}
    assert outcome(found) == (ConditionStatus.TRUE, "ReplacingWorkers")
    found = step(
        group("prefill", [worker("p-1", "b"), worker("p-2", "a", leaves=True)]),
        group("decode", [worker("d-1", "a", leaves=True), worker("d-2", "b")]),
    )
    assert found.costs == []
    assert replaced(found) == {"prefill": 1, "decode": 1}


def test_a_zone_that_is_begun_is_finished_before_the_next() -> None:
    found = step(group("decode", [worker("d-1", "a"), worker("d-2", "b")], [worker("d-3", "b")]))
    assert [pod.name for pod, _ in found.costs] == ["d-2"]


def test_a_batch_is_no_larger_than_the_components_strategy_allows() -> None:
    old = [worker(f"d-{number}", leaves=number < 2) for number in range(8)]
    assert replaced(step(group("decode", old))) == {"decode": 2}
    assert [pods_at_a_time(COMPONENTS["decode"], count) for count in (1, 4, 7, 8)] == [1, 1, 1, 2]
    three = COMPONENTS["decode"].model_validate(
        {"name": "x", "type": "decode", "strategy": {"rollingUpdate": {"maxUnavailable": 3}}}, by_alias=True
    )
    assert pods_at_a_time(three, 8) == 3


@pytest.mark.parametrize(
    ("new", "expected", "again_s"),
    [
        (worker("d-9", ready_s=59.0), (ConditionStatus.TRUE, "WarmingUp"), 1.0),
        (worker("d-9", ready_s=None, age_s=500.0), (ConditionStatus.TRUE, "WarmingUp"), 100.0),
        (worker("d-9", ready_s=None, age_s=600.0), (ConditionStatus.FALSE, "NewWorkersFail"), None),
        (
            worker("d-9", ready_s=20.0, is_failing=True),
            (ConditionStatus.FALSE, "NewWorkersFail"),
            40.0,
        ),
    ],
)
def test_the_next_batch_waits_until_new_workers_are_warm(
    new: Pod, expected: tuple[ConditionStatus, str], again_s: float | None
) -> None:
    found = step(group("decode", [worker("d-1", leaves=True)], [new]), group("prefill", [worker("p-1")]))
    assert replaced(found) == {"decode": 0, "prefill": 0}
    assert outcome(found) == expected
    assert found.again_s == (None if again_s is None else pytest.approx(again_s))
    assert found.costs == []
    assert found.finding is not None
    assert "d-9" in found.finding.message


def test_a_worker_that_was_restarted_and_is_warm_again_holds_up_nothing() -> None:
    found = step(group("decode", [worker("d-1", leaves=True)], [worker("d-9", is_failing=True)]))
    assert replaced(found) == {"decode": 1}


def test_an_unavailable_deployment_pauses_after_the_first_batch_only() -> None:
    old = [worker("d-1", leaves=True)]
    assert replaced(step(group("decode", old), serves=Serving("nobody serves"))) == {"decode": 1}
    found = step(group("decode", old, [worker("d-9")]), serves=Serving("nobody serves"))
    assert replaced(found) == {"decode": 0}
    assert outcome(found) == (ConditionStatus.FALSE, "NotAvailable")
    assert found.again_s == LOOK_AGAIN_S
    assert found.finding is not None
    assert "nobody serves" in found.finding.message


def test_new_workers_that_a_frontend_passes_over_pause_the_upgrade() -> None:
    workers = [Registered("m", Role.DECODE, pod=f"d-{number}", worker_id=number) for number in (1, 8, 9)]
    group_of = group("decode", [worker("d-1", leaves=True)], [worker("d-8"), worker("d-9")])
    assert replaced(step(group_of, serves=Serving(passed_over={1}, workers=workers))) == {"decode": 1}
    found = step(group_of, serves=Serving(passed_over={9}, workers=workers))
    assert replaced(found) == {"decode": 0}
    assert outcome(found) == (ConditionStatus.FALSE, "NewWorkersPassedOver")
    assert found.finding is not None
    assert "passes them over: d-9. " in found.finding.message


def test_no_further_worker_goes_until_the_circuits_of_new_ones_are_known() -> None:
    unknown = Serving(passed_over=None)
    old = [worker("d-1"), worker("d-2", ready_s=None, leaves=True)]
    assert replaced(step(group("decode", old), serves=unknown)) == {"decode": 1}, "there is no new one yet"
    found = step(group("decode", old, [worker("d-9")]), serves=unknown)
    assert replaced(found) == {"decode": 0}
    assert outcome(found) == (ConditionStatus.UNKNOWN, "CircuitsUnknown")
    half = group("decode", old, [worker("d-9")], replicas=4, paused=False)
    assert replaced(step(half, serves=unknown)) == {"decode": 1}, "the one that is missing"
    slow = group("decode", old, [worker("d-9")], paused=False)
    assert replaced(step(slow, serves=unknown)) == {"decode": 0}
    prefill = group("prefill", [worker("p-1")], [worker("p-9")])
    slow = group("decode", old, paused=False)
    assert replaced(step(prefill, slow, serves=unknown)) == {"prefill": 0, "decode": 1}, "no new one yet"


def registered(pod: str, role: Role, version: str, zone: str = "a") -> Registered:
    return Registered("m", role, domains={"zone": zone}, pod=pod, kv_format=KvFormat("vllm", version))


@pytest.mark.parametrize(
    ("prefill", "decode", "zone", "is_pair"),
    [("2", "2", "a", True), ("2", "3", "a", False), ("2", "", "a", True), ("2", "3", "b", True)],
)
def test_new_workers_of_a_zone_that_are_no_pair_pause_the_upgrade(
    prefill: str, decode: str, zone: str, is_pair: bool
) -> None:
    workers = [
        registered("p-9", Role.PREFILL, prefill),
        registered("d-9", Role.DECODE, decode, zone),
        registered("d-1", Role.DECODE, "2"),
    ]
    serves = Serving(workers=workers, domain="zone")
    ofs = group("prefill", [worker("p-1", leaves=True)], [worker("p-9")])
    for decodes in (group("decode", [worker("d-1")], [worker("d-9")]), group("decode", [], [worker("d-9")])):
        found = step(ofs, decodes, serves=serves)
        if is_pair:
            assert outcome(found) == (ConditionStatus.TRUE, "ReplacingWorkers")
            continue
        assert outcome(found) == (ConditionStatus.FALSE, "NewWorkersWithoutPair")
        assert set(replaced(found).values()) == {0}
        assert found.finding is not None
        assert "in zone a can take the KV" in found.finding.message
        assert "engine=vllm version=3" in found.finding.message or not decodes.old
    unchanged = [group("prefill", [], [worker("p-9")]), group("decode", [], [worker("d-9")])]
    other = group("worker", [worker("w-1", leaves=True)])
    assert replaced(step(*unchanged, other, serves=serves)) == {"worker": 1}


def test_old_workers_that_are_not_ready_go_first_and_alone() -> None:
    dead = worker("d-2", "b", ready_s=None)
    old, other = [worker("d-1"), dead], group("prefill", [worker("p-1", leaves=True)])
    found = step(group("decode", old, written=False), other)
    assert found.costs == [(dead, LEAVES_FIRST)]
    assert replaced(found) == {"decode": 0, "prefill": 0}
    old[1] = replace(dead, deletion_cost=LEAVES_FIRST)
    for serves in (SERVED, Serving("nobody serves")):
        found = step(group("decode", old, [worker("d-9")]), other, serves=serves)
        assert replaced(found) == {"decode": 1, "prefill": 0}


@pytest.mark.parametrize(
    "cold", [[], [worker("d-9", ready_s=1.0)], [worker(f"d-{n}", ready_s=None, age_s=9.0) for n in (8, 9)]]
)
def test_old_workers_that_are_not_ready_go_no_faster_than_a_batch(cold: Sequence[Pod]) -> None:
    old = [worker(f"d-{n}", ready_s=None, leaves=n < 2 - len(cold)) for n in range(8 - len(cold))]
    found = step(group("decode", old, cold), serves=Serving("nobody serves"))
    assert found.costs == []
    assert replaced(found) == {"decode": 2 if len(cold) < 2 else 0}  # the cold ones are among these


def test_no_old_worker_goes_while_new_ones_fail() -> None:
    old = [worker(f"d-{n}", ready_s=None) for n in range(7)]
    failing = worker("d-9", ready_s=None, is_failing=True)
    passed_over = Serving(passed_over={9}, workers=[Registered("m", Role.DECODE, pod="d-9", worker_id=9)])
    for new, serves in ((failing, SERVED), (worker("d-9"), passed_over)):
        for paused, replicas in ((True, None), (False, None), (False, 9)):
            found = step(group("decode", old, [new], paused=paused, replicas=replicas), serves=serves)
            assert found.costs == []
            assert replaced(found) == {"decode": 0}
            assert outcome(found)[0] is ConditionStatus.FALSE


def test_workers_of_an_unchanged_component_hold_up_nothing() -> None:
    changing = group("decode", [worker("d-1", leaves=True)])
    failing = worker("p-1", ready_s=None, is_failing=True)
    passed_over = Serving(passed_over={2}, workers=[Registered("m", Role.PREFILL, pod="p-2", worker_id=2)])
    unchanged = group("prefill", (), [failing, worker("p-2")])
    for serves in (SERVED, Serving("nobody serves"), Serving(passed_over=None), passed_over):
        assert replaced(step(changing, unchanged, serves=serves)) == {"decode": 1}


def test_a_new_worker_is_overdue_by_the_time_since_it_was_last_ready() -> None:
    old, was_ready = [worker("d-1")], replace(worker("d-9", ready_s=599.0), is_ready=False)
    assert outcome(step(group("decode", old, [was_ready]))) == (ConditionStatus.TRUE, "WarmingUp")
    was_ready = replace(worker("d-9", ready_s=600.0), is_ready=False)
    assert outcome(step(group("decode", old, [was_ready]))) == (ConditionStatus.FALSE, "NewWorkersFail")


def test_marks_of_workers_that_are_no_longer_next_are_removed_first() -> None:
    old = [worker("d-1", "a", leaves=True), worker("d-2", "b", leaves=True)]
    found = step(group("decode", old, [worker("d-9", "b")]))
    assert found.costs == [(old[0], None)]
    assert replaced(found) == {"decode": 0}


def test_ready_workers_go_from_the_oldest_replica_set_only() -> None:
    old, younger = [worker("d-1", "b"), worker("d-2", "c")], [worker("d-3", "a"), worker("d-0", "b")]
    found = step(group("decode", old, [worker("d-9", "a")], younger=younger))
    assert found.costs == [(old[0], LEAVES_FIRST)]
    assert found.finding is not None
    assert "in zone b. " in found.finding.message


def test_a_deployment_goes_on_until_the_new_workers_of_its_batch_exist() -> None:
    old, prefill = [worker("d-1", leaves=True)], group("prefill", [worker("p-1", leaves=True)])
    found = step(group("decode", old, replicas=3, paused=False), prefill)
    assert replaced(found) == {"decode": 3, "prefill": 0}, "two are missing, and one is still to go"
    assert outcome(found) == (ConditionStatus.TRUE, "ReplacingWorkers")
    loading = group("decode", [worker("d-2")], [worker("d-9", ready_s=None, age_s=9.0)])
    slow = group("prefill", [worker("p-1", leaves=True), worker("p-2")], paused=False)
    assert replaced(step(loading, slow)) == {"decode": 0, "prefill": 1}, "both roles go in one batch"
    for other in (
        group("decode", old, replicas=3),
        group("decode", old, replicas=3, paused=False, written=False),
    ):
        assert replaced(step(other, prefill)) == {"decode": 0, "prefill": 0}


POLICY: dict[str, JsonValue] = {"domain": "zone", "labelKey": ZONE}


def planned(fields: dict[str, JsonValue], by: str = "zone", policy: JsonValue = None) -> Plan:
    """A deployment with a decode component of these fields that is upgraded by this level."""
    component: JsonValue = {"name": "one", "type": "decode", "podTemplate": ENGINE, **fields}
    front: JsonValue = {"name": "front", "type": "frontend"}
    spec: dict[str, JsonValue] = {"components": [component, front], "upgrade": {"by": by}}
    if policy is not None:
        spec["experimental"] = {"kvTransferPolicy": policy}
    reading = read_deployment({"metadata": {"name": "llm", "namespace": "fleet"}, "spec": spec})
    assert reading.deployment is not None, reading.problems
    return plan(reading.deployment, FACTS, DEFAULTS)


@pytest.mark.parametrize(
    ("fields", "by", "policy", "where", "words"),
    [
        ({}, "zone", None, "spec.upgrade", "needs a policy of KV transfers"),
        ({}, "rack", POLICY, "spec.upgrade.by", "'rack' is no level of the policy: zone"),
        (
            {"strategy": {"type": "Recreate"}},
            "zone",
            POLICY,
            "spec.components[0].strategy.type",
            "say RollingUpdate",
        ),
        (
            {"strategy": {"rollingUpdate": {"maxSurge": 1}}},
            "zone",
            POLICY,
            "spec.components[0].strategy.rollingUpdate.maxSurge",
            "leave it out",
        ),
        ({"minReadySeconds": 0}, "zone", POLICY, "spec.components[0].minReadySeconds", "at least 1"),
        (
            {"progressDeadlineSeconds": 60},
            "zone",
            POLICY,
            "spec.components[0].minReadySeconds",
            "must be below progressDeadlineSeconds",
        ),
    ],
)
def test_an_impossible_upgrade_is_refused_at_its_field(
    fields: dict[str, JsonValue], by: str, policy: JsonValue, where: str, words: str
) -> None:
    (problem,) = planned(fields, by, policy).problems
    assert dotted(problem.path) == where
    assert words in problem.must


def test_workers_warm_up_for_a_minute_under_an_upgrade_and_frontends_do_not() -> None:
    found = of_kind(planned({}, policy=POLICY), "Deployment")
    assert at(found["llm-one"], "spec", "minReadySeconds") == 60
    assert not has(at(found["llm-front"], "spec"), "minReadySeconds")
