"""The ``Stalled`` and ``Reconciling`` conditions, by which kstatus (Flux) tells failure from progress.

Each is present only while it is true, as in kstatus.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from kvrouter.operator.api.deployment import ComponentSpec
from kvrouter.operator.api.status import ConditionStatus
from kvrouter.operator.labels.pods import Pod, Unstartable
from kvrouter.operator.plan.manifest import COMPONENT_LABEL
from kvrouter.operator.status.finding import RECONCILING, STALLED, Finding, named
from kvrouter.operator.status.resolved import RefusedObjects, condition_of

PULL_WITHIN_S = 120.0
"""How long a pod's image may fail to be pulled before its pod counts as unable to start."""

STALLS = frozenset({"SpecInvalid", "NameTaken", "PodsRefused"})
"""Reasons of ``Ready`` that stay until somebody changes something."""

BAD_TEMPLATE = frozenset({"NewWorkersFail", "NewWorkersWithoutPair"})
"""Reasons of ``Upgrading`` that stay until somebody states another template."""

TEMPLATE_LABEL = "pod-template-hash"
"""Label of pods and ReplicaSets: the template that they are of."""


class Rollout(NamedTuple):
    """The progress of a component's latest template: ``progress`` is the message of its Deployment's
    ``Progressing`` condition, which names the template's ReplicaSet; empty while it is about an earlier one.
    ``is_overdue``: its deadline passed.
    """

    component: str
    workload: str
    progress: str
    is_overdue: bool = False

    def has(self, pod: Pod) -> bool:
        """Whether a pod has the latest template."""
        own = f'"{self.workload}-{pod.labels.get(TEMPLATE_LABEL)}"'
        return pod.labels.get(COMPONENT_LABEL) == self.component and own in self.progress


def rollout_of(component: ComponentSpec, name: str, workload: Mapping[str, object]) -> Rollout:
    """Return the rollout of the Deployment ``name``, as the API server returns it."""
    progressing = condition_of(workload, "Progressing")
    is_overdue = progressing.get("status") == "False"
    return Rollout(component.name, name, str(progressing.get("message") or ""), is_overdue)


def progress(
    ready: Finding,
    refusals: RefusedObjects,
    rollouts: Sequence[Rollout],
    pods: Iterable[Pod],
    now: datetime,
    upgrading: Finding | None = None,
) -> dict[str, Finding]:
    """Return the one of the two conditions that is true; empty if ``ready`` is true. A Deployment that an
    upgrade keeps paused reports no progress: ``upgrading`` says that the new template is bad.
    """
    if ready.status is ConditionStatus.TRUE:
        return {}
    lasts = ready.reason == "WriteRefused" and refusals.are_lasting
    if ready.reason in STALLS or lasts:
        return {STALLED: ready._replace(status=ConditionStatus.TRUE)}
    stuck = _unstartable(rollouts, pods, now) or _overdue(rollouts)
    if stuck is None and upgrading is not None and upgrading.reason in BAD_TEMPLATE:
        stuck = upgrading._replace(status=ConditionStatus.TRUE)
    if stuck is not None and ready.reason != "WriteRefused":
        return {STALLED: stuck}
    return {RECONCILING: ready._replace(status=ConditionStatus.TRUE)}


def pull_ends_s(pods: Iterable[Pod], now: datetime) -> float | None:
    """Return in how many seconds the next pod counts as unable to start; None if no pod waits."""
    left = [
        PULL_WITHIN_S - seconds_since(pod.created, now)
        for pod in pods
        if pod.unstartable is not None and not pod.is_over
    ]
    return min((each for each in left if each > 0), default=None)


def _unstartable(rollouts: Sequence[Rollout], pods: Iterable[Pod], now: datetime) -> Finding | None:
    found: dict[Unstartable, list[str]] = {}
    for pod in pods:
        why = pod.unstartable
        if why is None or pod.is_over or not any(rollout.has(pod) for rollout in rollouts):
            continue
        if why is Unstartable.BAD_IMAGE_NAME or seconds_since(pod.created, now) >= PULL_WITHIN_S:
            found.setdefault(why, []).append(pod.name)
    if not found:
        return None
    lines = [
        f"a container of {named(names)} cannot start: {why.value}" for why, names in sorted(found.items())
    ]
    return Finding(ConditionStatus.TRUE, "PodsCannotStart", "; ".join(lines))


def _overdue(rollouts: Sequence[Rollout]) -> Finding | None:
    late = [rollout.component for rollout in rollouts if rollout.is_overdue]
    if not late:
        return None
    message = (
        f"pods of {named(late)} were not Ready within progressDeadlineSeconds: kubectl describe pod shows "
        "what they wait for. Give them more seconds where their engines take longer to load"
    )
    return Finding(ConditionStatus.TRUE, "ProgressDeadlineExceeded", message)


def seconds_since(time: str, now: datetime) -> float:
    """Return the seconds since a time in ISO 8601; 0 for any other text."""
    try:
        return (now - datetime.fromisoformat(time)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
