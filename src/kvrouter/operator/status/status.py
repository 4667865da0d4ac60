"""The whole status of a deployment, from its plan and the observed objects."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from kvrouter.operator.api.deployment import ComponentSpec, ComponentType, DynamoGraphDeployment
from kvrouter.operator.api.status import (
    ComponentStatus,
    Condition,
    DeploymentStatus,
    LinkStatus,
    PolicyStatus,
)
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.plan import Plan
from kvrouter.operator.policy import DeploymentPolicy, NamedTopology, RawLabel
from kvrouter.operator.status.available import Workers, available, role_mistakes
from kvrouter.operator.status.domains import (
    DomainCounts,
    balance_of,
    balanced,
    domain_counts_of,
    domain_statuses,
    had_decode,
    parted_domains,
)
from kvrouter.operator.status.finding import (
    AVAILABLE,
    DOMAIN_BALANCED,
    READY,
    RECONCILING,
    STALLED,
    TOPOLOGY_RESOLVED,
    UPGRADING,
    Finding,
    dated,
)
from kvrouter.operator.status.resolved import (
    NOTHING_REFUSED,
    RefusedObjects,
    invalid_spec,
    policy_level,
    ready,
    resolved,
)
from kvrouter.operator.status.stalled import Rollout, progress
from kvrouter.settings.problems import Problem


def deployment_status(
    deployment: DynamoGraphDeployment,
    planned: Plan,
    cluster_info: ClusterInfo,
    *,
    components: Sequence[ComponentStatus],
    pods: Iterable[Pod],
    previous: DeploymentStatus | None,
    now: datetime,
    workers: Workers,
    refusals: RefusedObjects = NOTHING_REFUSED,
    links: Sequence[LinkStatus] = (),
    rollouts: Sequence[Rollout] = (),
    upgrading: Finding | None = None,
) -> DeploymentStatus:
    """Return the status of ``deployment``.

    ``components`` are those with a Deployment in the cluster, ``rollouts`` their progress, ``pods`` all pods
    of the deployment, ``workers`` the registered ones, ``links`` those that a frontend learned,
    ``upgrading`` the state of an upgrade by domain. Without a policy it has the conditions Ready and
    Available, and Stalled or Reconciling while it is not Ready. ``now`` must know its time zone.
    """
    found = tuple(pods)
    spec = deployment.spec
    policy, counts = planned.policy, DomainCounts()
    findings = {
        READY: ready(spec.components, components, planned.problems, refusals),
        AVAILABLE: _with_mistakes(
            available(_scaled(spec.components, components), policy, found, workers),
            role_mistakes(found, workers),
        ),
    }
    if policy is not None and planned.resolution is not None:
        decode_replicas = sum(
            each.desired_replicas for each in components if _takes_decode(ComponentType(each.type))
        )
        level = policy_level(policy, planned.resolution)
        counts = domain_counts_of(found, level, decode_replicas=decode_replicas)
        has_prefill = ComponentType.PREFILL in [component.type for component in spec.components]
        findings[TOPOLOGY_RESOLVED] = resolved(policy, planned.resolution, found, cluster_info, refusals)
        started = had_decode(previous, policy)
        parted = parted_domains(workers.registered, policy.domain)
        findings[DOMAIN_BALANCED] = balanced(
            counts, policy, has_prefill=has_prefill, started=started, parted=parted
        )
    if upgrading is not None:
        findings[UPGRADING] = upgrading
    findings |= progress(findings[READY], refusals, rollouts, found, now, upgrading)
    return DeploymentStatus(
        observed_generation=deployment.metadata.generation,
        conditions=_conditions(findings, previous, deployment.metadata.generation, now),
        components=tuple(components),
        policy=None if policy is None else _policy(policy),
        domains=domain_statuses(counts),
        balance=balance_of(counts.domains),
        links=tuple(links) or None,
    )


def unreadable_status(
    generation: int,
    problems: Sequence[Problem],
    *,
    previous: DeploymentStatus | None,
    now: datetime,
    upgrading: Finding | None = None,
) -> DeploymentStatus:
    """Return the status of an invalid deployment: not Ready because of ``problems``, ``upgrading`` as given,
    and else as it was.
    """
    before = previous or DeploymentStatus()
    invalid = invalid_spec(problems)
    findings = {READY: invalid, **progress(invalid, NOTHING_REFUSED, (), (), now)}
    if upgrading is not None:
        findings[UPGRADING] = upgrading
    others = tuple(
        each for each in before.conditions if each.type not in (READY, STALLED, RECONCILING, UPGRADING)
    )
    conditions = (*_conditions(findings, before, generation, now), *others)
    return before.model_copy(update={"observed_generation": generation, "conditions": conditions})


def _with_mistakes(finding: Finding, mistakes: Sequence[str]) -> Finding:
    return finding._replace(message=". ".join((finding.message, *mistakes)))


def _scaled(components: Sequence[ComponentSpec], there: Sequence[ComponentStatus]) -> list[ComponentSpec]:
    """Return ``components`` with their desired replicas, from the component or its Deployment."""
    desired = {each.name: each.desired_replicas for each in there}
    return [
        each.model_copy(update={"replicas": desired.get(each.name, 1)}) if each.replicas is None else each
        for each in components
    ]


def _takes_decode(kind: ComponentType) -> bool:
    return kind.is_worker and kind is not ComponentType.PREFILL


def _conditions(
    findings: dict[str, Finding], previous: DeploymentStatus | None, generation: int, now: datetime
) -> tuple[Condition, ...]:
    before = () if previous is None else previous.conditions
    return tuple(
        dated(kind, finding, before, generation=generation, now=now) for kind, finding in findings.items()
    )


def _policy(policy: DeploymentPolicy) -> PolicyStatus:
    source = policy.source
    return PolicyStatus(
        domain=policy.domain,
        enforcement=policy.enforcement,
        preferred_weight=policy.preferred_weight,
        cluster_topology_name=source.name if isinstance(source, NamedTopology) else None,
        label_key=source.key if isinstance(source, RawLabel) else None,
    )
