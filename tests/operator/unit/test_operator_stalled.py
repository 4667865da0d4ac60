"""When a deployment counts as stalled, and when it only takes time."""

from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import JsonValue

from kvrouter.operator.api.status import ConditionStatus
from kvrouter.operator.labels.pods import Pod, read_pod
from kvrouter.operator.status.finding import RECONCILING, STALLED, Finding
from kvrouter.operator.status.resolved import NOTHING_REFUSED, RefusedObjects
from kvrouter.operator.status.stalled import PULL_WITHIN_S, Rollout, progress, pull_ends_s, rollout_of
from tests.testing.deployment_statuses import NOW
from tests.testing.planned_deployments import deployment

DECODE = deployment(types=("frontend", "decode")).spec.components[1]
PROGRESSING = 'ReplicaSet "llm-decode-5d9c8f7b6" is progressing.'
ROLLOUT = Rollout("decode", "llm-decode", PROGRESSING)
UPDATING = Finding(ConditionStatus.FALSE, "Updating", "pods of the latest template: decode 0 of 1")


def waiting(reason: str, *, age_s: float = 0.0, template: str = "5d9c8f7b6") -> Pod:
    """A decode worker of which one container waits."""
    created = (NOW - timedelta(seconds=age_s)).isoformat()
    labels: JsonValue = {"kvrouter.dev/component": "decode", "pod-template-hash": template}
    metadata: JsonValue = {"name": "llm-decode-x", "labels": labels, "creationTimestamp": created}
    container: JsonValue = {"name": "main", "state": {"waiting": {"reason": reason}}}
    found = read_pod({"metadata": metadata, "status": {"containerStatuses": [container]}})
    assert found is not None
    return found


def stalled(
    ready: Finding = UPDATING,
    *pods: Pod,
    rollout: Rollout = ROLLOUT,
    refusals: RefusedObjects = NOTHING_REFUSED,
) -> str | None:
    """Why it is stalled; None where it gets on, and then it is reconciling."""
    found = progress(ready, refusals, [rollout], pods, NOW)
    (kind,) = found
    assert found[kind].status is ConditionStatus.TRUE
    assert kind in (STALLED, RECONCILING)
    return found[kind].reason if kind == STALLED else None


def because(reason: str) -> Finding:
    return Finding(ConditionStatus.FALSE, reason, "so it is")


def test_ready_deployment_is_neither_reconciling_nor_stalled() -> None:
    ready = Finding(ConditionStatus.TRUE, "AllPodsReady", "all 2 pods are Ready")
    late = ROLLOUT._replace(is_overdue=True)
    assert progress(ready, NOTHING_REFUSED, [late], [waiting("InvalidImageName")], NOW) == {}


@pytest.mark.parametrize("reason", ["SpecInvalid", "NameTaken", "PodsRefused", "WriteRefused"])
def test_reason_that_a_user_must_fix_stalls_the_deployment(reason: str) -> None:
    assert stalled(because(reason)) == reason


@pytest.mark.parametrize("reason", ["NotApplied", "Updating", "PodsNotReady"])
def test_reason_that_only_takes_time_does_not_stall_the_deployment(reason: str) -> None:
    assert stalled(because(reason)) is None


def test_transiently_refused_write_does_not_stall_the_deployment() -> None:
    assert stalled(because("WriteRefused"), refusals=RefusedObjects(are_lasting=False)) is None


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"])
def test_image_pull_or_container_config_failure_stalls_after_a_limit(reason: str) -> None:
    assert stalled(UPDATING, waiting(reason, age_s=PULL_WITHIN_S - 1)) is None
    assert pull_ends_s([waiting(reason, age_s=PULL_WITHIN_S - 1)], NOW) == pytest.approx(1)
    assert stalled(UPDATING, waiting(reason, age_s=PULL_WITHIN_S)) == "PodsCannotStart"
    assert pull_ends_s([waiting(reason, age_s=PULL_WITHIN_S)], NOW) is None


def test_invalid_image_name_stalls_at_once_and_a_starting_container_never() -> None:
    assert stalled(UPDATING, waiting("InvalidImageName")) == "PodsCannotStart"
    for reason in ("ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        assert stalled(UPDATING, waiting(reason, age_s=10 * PULL_WITHIN_S)) is None
        assert pull_ends_s([waiting(reason)], NOW) is None


def test_pods_of_an_older_template_or_that_are_over_do_not_stall() -> None:
    assert stalled(UPDATING, waiting("InvalidImageName", template="older")) is None
    assert stalled(UPDATING, replace(waiting("InvalidImageName"), is_over=True)) is None


def test_passed_progress_deadline_stalls_only_for_the_current_generation() -> None:
    condition: JsonValue = {"type": "Progressing", "status": "False", "message": PROGRESSING}
    status: JsonValue = {"observedGeneration": 2, "conditions": [condition]}
    late = rollout_of(DECODE, "llm-decode", {"metadata": {"generation": 2}, "status": status})
    assert stalled(rollout=late) == "ProgressDeadlineExceeded"
    before = rollout_of(DECODE, "llm-decode", {"metadata": {"generation": 3}, "status": status})
    assert before == Rollout("decode", "llm-decode", "")
    assert stalled(UPDATING, waiting("InvalidImageName"), rollout=before) is None


def test_a_new_template_that_is_bad_stalls_in_a_paused_upgrade() -> None:
    ready = Finding(ConditionStatus.FALSE, "Updating", "x")
    for reason in ("NewWorkersFail", "NewWorkersWithoutPair"):
        fails = Finding(ConditionStatus.FALSE, reason, "y")
        stalled = progress(ready, NOTHING_REFUSED, (), (), NOW, fails)
        assert stalled == {"Stalled": Finding(ConditionStatus.TRUE, reason, "y")}
    loads = Finding(ConditionStatus.FALSE, "WarmingUp", "y")
    assert [*progress(ready, NOTHING_REFUSED, (), (), NOW, loads)] == ["Reconciling"]
