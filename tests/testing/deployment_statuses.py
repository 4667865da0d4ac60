"""Statuses for tests of the operator: pods in zones, and what is reported of a deployment with them."""

from datetime import UTC, datetime

from pydantic import JsonValue

from kvrouter.core.workers import Role
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.operator.api.status import ComponentStatus, Condition, ConditionStatus, DeploymentStatus
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.plan import plan
from kvrouter.operator.status.available import Registered, Workers
from kvrouter.operator.status.resolved import RefusedObjects
from kvrouter.operator.status.status import deployment_status
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment

TYPES = ("frontend", "prefill", "decode")
NOTHING_REFUSED = RefusedObjects()
SERVING = Workers((Registered("llama", Role.BOTH),))
FRONTEND = Pod(
    "frontend-0", "fleet", "u", "node-f", {"kvrouter.dev/component-type": "frontend"}, is_ready=True
)
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
    """Every component as it is when all is done."""
    return [
        ComponentStatus(
            name=component.name,
            type=component.type.value,
            desired_replicas=replicas,
            replicas=replicas,
            ready_replicas=replicas,
            updated_replicas=replicas,
        )
        for component in of.spec.components
        for replicas in [1 if component.replicas is None else component.replicas]
    ]


def status(
    found: list[Pod],
    *,
    of: DynamoGraphDeployment | None = None,
    policy: dict[str, JsonValue] | None = REQUIRED,
    cluster_info: ClusterInfo = FACTS,
    previous: DeploymentStatus | None = None,
    now: datetime = NOW,
    refusals: RefusedObjects = NOTHING_REFUSED,
    workers: Workers = SERVING,
) -> DeploymentStatus:
    """The status of ``of``, or of a deployment with ``policy``, with these pods, and a frontend's."""
    of = of or deployment(policy=policy, types=TYPES)
    return deployment_status(
        of,
        plan(of, cluster_info, DEFAULTS),
        cluster_info,
        components=settled(of),
        pods=[FRONTEND, *found],
        previous=previous,
        now=now,
        refusals=refusals,
        workers=workers,
    )


def condition(found: DeploymentStatus, kind: str) -> Condition:
    """One of its conditions."""
    return next(condition for condition in found.conditions if condition.type == kind)


def status_and_reason(found: DeploymentStatus, kind: str) -> tuple[ConditionStatus, str]:
    """Whether a condition holds, and its reason."""
    reported = condition(found, kind)
    return reported.status, reported.reason
