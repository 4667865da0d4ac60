"""Upgrades by domain: which workers are replaced next, and what their Deployments state until then.

A new template reaches the Deployments of workers paused. Then one batch after another is replaced: old
workers of one domain, prefill and decode together. They get a low deletion cost, so that their ReplicaSet
removes them first, and their Deployments go on until that many are replaced. All of it follows from the
objects in the cluster: another leader goes on from there.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from kvrouter.kube.client import CONFLICT, NOT_FOUND, KubeClient, RequestRefused
from kvrouter.kube.objects import (
    Key,
    Manifest,
    ResourceKind,
    annotations_of,
    fields_of,
    key_of,
    labels_of,
    metadata_of,
    uid_of,
)
from kvrouter.operator.api.deployment import ComponentSpec, ComponentType, DynamoGraphDeployment
from kvrouter.operator.api.rollout import PROGRESS_DEADLINE_S
from kvrouter.operator.api.status import ConditionStatus, DeploymentStatus
from kvrouter.operator.cluster_info import PODS
from kvrouter.operator.labels.level_labels import label_of
from kvrouter.operator.labels.pods import DELETION_COST, Pod
from kvrouter.operator.plan.manifest import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    MANAGER,
    TEMPLATE_HASH,
    TYPE_LABEL,
    selector,
)
from kvrouter.operator.plan.plan import Plan
from kvrouter.operator.plan.workload import min_ready_s, pods_at_a_time
from kvrouter.operator.reconcile.apply import (
    WORKLOADS,
    holders_of,
    kind_of,
    owner_uid_of,
    stated_replicas,
)
from kvrouter.operator.status.available import Registered
from kvrouter.operator.status.domains import parted_domains
from kvrouter.operator.status.finding import AVAILABLE, Finding, named
from kvrouter.operator.status.resolved import component_status, count_of, joined, n_updated
from kvrouter.operator.status.stalled import TEMPLATE_LABEL, seconds_since

REPLICA_SETS = ResourceKind("apps/v1", "ReplicaSet", "replicasets", is_metadata_enough=True)
LEAVES_FIRST = "-1000"
"""The deletion cost of the workers that are replaced next."""
LOOK_AGAIN_S = 5.0
"""How soon an upgrade looks again whether the deployment is Available, or tries a refused pause again."""
NOBODY_GOES = frozenset(
    {"NewWorkersFail", "NewWorkersPassedOver", "NewWorkersWithoutPair", "CircuitsUnknown"}
)
"""Reasons of ``Upgrading`` that speak against the new template, or may: no further worker gets it."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of one component: its Deployment as planned and as it is in the cluster, its pods of older
    templates by ReplicaSet, the oldest first, and its pods of the planned one. A new worker is warm once it
    was Ready for ``warm_up_s``, and overdue if it is not Ready for ``deadline_s``.
    """

    component: ComponentSpec
    planned: Manifest
    current: Manifest
    old_sets: Sequence[Sequence[Pod]]
    new: Sequence[Pod]
    warm_up_s: float
    deadline_s: float

    @property
    def old(self) -> list[Pod]:
        """The pods of older templates."""
        return [pod for pods in self.old_sets for pod in pods]

    @property
    def at_a_time(self) -> int:
        """How many workers the component's strategy replaces at a time."""
        return pods_at_a_time(self.component, stated_replicas(self.current) or 0)

    @property
    def n_missing(self) -> int:
        """How many pods are missing, as between the end of an old one and the start of the new one."""
        return max(0, (stated_replicas(self.current) or 0) - len(self.old) - len(self.new))

    @property
    def leaving(self) -> list[Pod]:
        """The old workers that are marked to go next."""
        return [pod for pod in self.old if pod.deletion_cost == LEAVES_FIRST]

    @property
    def is_between(self) -> bool:
        """Whether a batch was let go, and not all of its new workers are there yet."""
        is_written = _template_hash(self.current) == _template_hash(self.planned)
        return is_written and not _is_paused(self.current) and bool(self.n_missing or self.leaving)

    def unready(self, now: datetime) -> list[Pod]:
        """Return the old workers that are not Ready and may go now, in the order in which Kubernetes takes
        them: no more than a batch has besides the new ones that are not warm.
        """
        found = [
            pod
            for pods in self.old_sets
            for pod in sorted(pods, key=lambda pod: (pod.node_name is not None, pod.name))
            if not pod.is_ready
        ]
        return found[: max(0, self.at_a_time - len(self.cold(now)))]

    def batch(self, label: str, domain: str) -> list[Pod]:
        """Return the next old workers of a domain. Kubernetes takes Ready ones from the oldest ReplicaSet."""
        there = [pod for pod in self.old_sets[0] if pod.labels.get(label, "") == domain]
        return sorted(there, key=lambda pod: pod.name)[: self.at_a_time]

    def cold(self, now: datetime) -> list[Pod]:
        """Return the new workers that are not warm."""
        return [
            pod
            for pod in self.new
            if not pod.is_ready or seconds_since(pod.ready_since, now) < self.warm_up_s
        ]

    def warm_in_s(self, pod: Pod, now: datetime) -> float:
        """Return in how many seconds a cold worker is warm if it is Ready, and overdue if it is not."""
        if pod.is_ready:
            return self.warm_up_s - seconds_since(pod.ready_since, now)
        return self.deadline_s - seconds_since(pod.ready_since or pod.created, now)

    def is_bad(self, pod: Pod, now: datetime) -> bool:
        """Whether a cold worker was restarted, cannot start or is overdue."""
        return pod.is_failing or (not pod.is_ready and self.warm_in_s(pod, now) <= 0)


class Upgrade(NamedTuple):
    """The next step: the Deployments by their component, and the deletion costs to write on pods, None to
    remove one. ``finding`` is that of the condition Upgrading, None once all workers have the planned
    template; ``again_s`` is in how many seconds a step may follow without a change in the cluster.
    ``refused`` has a line for each request that the API server refused.
    """

    workloads: Mapping[str, Manifest] = {}
    costs: Sequence[tuple[Pod, str | None]] = ()
    finding: Finding | None = None
    again_s: float | None = None
    refused: Sequence[str] = ()


class Serving(NamedTuple):
    """How requests are served: why they are not, empty if they are or it is unknown; the ids of workers that
    a frontend passes over, None until that was read; the registered workers, and the domain that KV stays in.
    """

    unavailable: str = ""
    passed_over: Collection[int] | None = ()
    workers: Sequence[Registered] = ()
    domain: str = ""


def unavailable_by(previous: DeploymentStatus | None) -> str:
    """Return why requests are not served by the last status; empty if they are, or it is unknown."""
    conditions = () if previous is None else previous.conditions
    found = [each for each in conditions if each.type == AVAILABLE and each.status is ConditionStatus.FALSE]
    return found[0].message if found else ""


def next_step(groups: Sequence[WorkerGroup], by: str, label: str, serves: Serving, now: datetime) -> Upgrade:
    """Return the next step of an upgrade by the domain ``by``, whose value is in the ``label`` of pods.

    Old workers that are not Ready serve nothing: they go first, and do not wait for warm workers or requests
    that are served; but nothing goes while new workers fail. Otherwise a batch waits until all new ones are
    warm.
    """
    changing = [group for group in groups if group.old]
    if not changing:
        done = [(pod, None) for group in groups for pod in group.new if pod.deletion_cost == LEAVES_FIRST]
        return Upgrade(costs=done)
    waits, again_s = _waits(groups, serves, now)
    batches, finding = _batches(changing, by, label, waits, now)
    between = {} if waits is None else _between(changing, waits)
    costs: list[tuple[Pod, str | None]] = []
    for group in changing:
        leaving = batches.get(group.component.name, ())
        if leaving and group.component.name not in between:
            costs += _costs(group.old, leaving)
    workloads = {}
    for group in changing:
        name = group.component.name
        if name in between:
            workloads[name] = _replacing_only(group, between[name])
            continue
        leaving = () if costs else batches.get(name, ())
        workloads[name] = _replacing_only(group, len(leaving) and len(leaving) + len(group.cold(now)))
    return Upgrade(workloads, costs, finding, again_s)


def _batches(
    changing: Sequence[WorkerGroup], by: str, label: str, waits: Finding | None, now: datetime
) -> tuple[Mapping[str, Sequence[Pod]], Finding]:
    """Return the old workers that go now, by component, and the finding that says so, or why none go."""
    if waits is not None and waits.reason in NOBODY_GOES:
        return {}, waits
    unready = {group.component.name: group.unready(now) for group in changing}
    if any(unready.values()):
        names = _names(pod for pods in unready.values() for pod in pods)
        message = f"next are workers that are not Ready: {names}. {_all_old(changing)}"
        return unready, waits or Finding(ConditionStatus.TRUE, "ReplacingWorkers", message)
    if waits is not None:
        return {}, waits
    domain = _next_domain(changing, label)
    found = {group.component.name: group.batch(label, domain) for group in changing}
    return found, _replacing(changing, by, label, domain)


def _between(changing: Sequence[WorkerGroup], waits: Finding) -> Mapping[str, int]:
    """Return how many workers the Deployments amid a batch replace, by component: those that are missing and
    those that are marked, unless it is unknown how new ones of the same component serve. No other worker goes
    when a new one is warm while others of its batch are missing; and where the first new prefill worker is
    there before the decode Deployment was looked at, that one keeps its batch.
    """
    if waits.status is ConditionStatus.FALSE:
        return {}
    is_known = waits.status is ConditionStatus.TRUE
    return {
        group.component.name: group.n_missing + (is_known or not group.new) * len(group.leaving)
        for group in changing
        if group.is_between
    }


def _costs(old: Iterable[Pod], leaving: Sequence[Pod]) -> Iterator[tuple[Pod, str | None]]:
    """Yield what makes ``leaving`` the first of a component's old workers to go, and no others."""
    names = {pod.name for pod in leaving}
    for pod in old:
        is_marked = pod.deletion_cost == LEAVES_FIRST
        if is_marked != (pod.name in names):
            yield pod, None if is_marked else LEAVES_FIRST


def _waits(
    groups: Sequence[WorkerGroup], serves: Serving, now: datetime
) -> tuple[Finding | None, float | None]:
    """Return what the next batch waits for, None if for nothing, and in how many seconds that may change.

    What fails in a component without old workers does not count: its template may be unchanged.
    """
    changing = [group for group in groups if group.old]
    cold = [
        (group, pod) for group in groups for pod in group.cold(now) if group.old or not group.is_bad(pod, now)
    ]
    failing = [pod for group, pod in cold if group.is_bad(pod, now)]
    left = [group.warm_in_s(pod, now) for group, pod in cold]
    again_s = min((each for each in left if each > 0), default=None)
    if failing:
        message = (
            f"paused: new workers were restarted, cannot start or are not Ready in time: {_names(failing)}. "
            f"kubectl describe pod shows why. {_kept(groups)} until these are Ready, or the spec changes"
        )
        return Finding(ConditionStatus.FALSE, "NewWorkersFail", message), again_s
    by_circuits = _by_circuits(changing, serves)
    if by_circuits is not None:
        return by_circuits, again_s
    starting = [group.component.name for group in groups if group.n_missing]
    if starting:
        message = f"old workers of {named(starting)} ended, and new ones start. {_kept(groups)} until then"
        return Finding(ConditionStatus.TRUE, "ReplacingWorkers", message), again_s
    if cold:
        message = f"new workers load or warm up: {_names(pod for _, pod in cold)}. {_kept(groups)} until then"
        return Finding(ConditionStatus.TRUE, "WarmingUp", message), again_s
    without_pair = _without_pair(groups, serves)
    if without_pair is not None:
        return without_pair, None
    if serves.unavailable and any(group.new for group in changing):
        message = (
            f"paused: {serves.unavailable}. {_kept(groups)} until requests are served, or the spec changes"
        )
        return Finding(ConditionStatus.FALSE, "NotAvailable", message), LOOK_AGAIN_S
    return None, None


def _by_circuits(changing: Sequence[WorkerGroup], serves: Serving) -> Finding | None:
    """Return the finding that a frontend passes new workers over, or that this is unknown; else None."""
    new = {pod.name for group in changing for pod in group.new}
    if new and serves.passed_over is None:
        message = (
            "no frontend's metrics were read yet, so nobody knows whether requests fail at new workers. "
            f"{_kept(changing)} until then"
        )
        return Finding(ConditionStatus.UNKNOWN, "CircuitsUnknown", message)
    failed = {each.pod for each in serves.workers if each.worker_id in (serves.passed_over or ())} & new
    if failed:
        message = (
            "paused: requests or KV transfers failed at new workers, and a frontend passes them over: "
            f"{named(failed)}. {_kept(changing)} until it no longer does, or the spec changes"
        )
        return Finding(ConditionStatus.FALSE, "NewWorkersPassedOver", message)
    return None


def _without_pair(groups: Sequence[WorkerGroup], serves: Serving) -> Finding | None:
    """Return the finding that the new workers of a domain cannot hand KV to each other; else None."""
    pods = {pod.name for group in groups for pod in group.new}
    changed = {pod.name for group in groups if group.old for pod in group.new}
    new = [each for each in serves.workers if each.pod in pods]
    formats = {each.domains.get(serves.domain): each.kv_format for each in new if each.pod in changed}
    parted = [each for each in parted_domains(new, serves.domain) if each in formats]
    if not parted:
        return None
    message = (
        f"paused: no new decode worker in {serves.domain} {named(parted)} can take the KV of a new prefill "
        f"worker. One of them has the KV format {formats[parted[0]]}: state engines that can talk for both "
        f"roles. {_kept(groups)} until the spec changes"
    )
    return Finding(ConditionStatus.FALSE, "NewWorkersWithoutPair", message)


def _next_domain(changing: Sequence[WorkerGroup], label: str) -> str:
    """Return the domain whose workers are replaced next: one that is begun is finished first."""
    new = Counter(pod.labels.get(label, "") for group in changing for pod in group.new)
    old = {pod.labels.get(label, "") for group in changing for pod in group.old_sets[0]}
    return min(old, key=lambda domain: (-new[domain], domain))


def _replacing(changing: Sequence[WorkerGroup], by: str, label: str, domain: str) -> Finding:
    n_there = sum(pod.labels.get(label, "") == domain for group in changing for pod in group.old)
    place = f"in {by} {domain}" if domain else f"without a {by}"
    message = f"next are {n_there} workers {place}. {_all_old(changing)}"
    return Finding(ConditionStatus.TRUE, "ReplacingWorkers", message)


def _all_old(groups: Sequence[WorkerGroup]) -> str:
    return f"All that have the older template: {_old(groups)}"


def _kept(groups: Sequence[WorkerGroup]) -> str:
    return f"Others keep the older template ({_old(groups)})"


def _old(groups: Sequence[WorkerGroup]) -> str:
    """Return how many workers of each component have an older template."""
    return ", ".join(f"{group.component.name} {len(group.old)}" for group in groups if group.old)


def _names(pods: Iterable[Pod]) -> str:
    return named(pod.name for pod in pods)


def _replacing_only(group: WorkerGroup, n_workers: int) -> Manifest:
    """Return the planned Deployment so that it replaces so many workers and no more; with 0 it is paused."""
    if not n_workers:
        return _with(group.planned, {"paused": True})
    rolling: Manifest = {"maxSurge": 0, "maxUnavailable": n_workers}
    return _with(group.planned, {"strategy": {"type": "RollingUpdate", "rollingUpdate": rolling}})


def _with(manifest: Manifest, fields: Manifest) -> Manifest:
    return {**manifest, "spec": {**fields_of(manifest.get("spec")), **fields}}


def _template_hash(manifest: Manifest) -> object:
    return annotations_of(manifest).get(TEMPLATE_HASH)


class Upgrades:
    """Stages the changes of workers' templates in deployments with ``spec.upgrade``."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def stage(
        self,
        deployment: DynamoGraphDeployment,
        planned: Plan,
        workloads: Iterable[Manifest],
        pods: Sequence[Pod],
        serves: Serving,
        now: datetime,
    ) -> tuple[Plan, Upgrade]:
        """Return the plan with the Deployments of the next step, whose deletion costs are written; while
        nothing can be planned, those that replace workers are paused.

        What the API server refuses leaves the Deployments paused. Raises ClusterError.
        """
        upgrade, resolution, there = deployment.spec.upgrade, planned.resolution, tuple(workloads)
        if planned.problems:
            return planned, Upgrade() if upgrade is None else await self.pause(there)
        current, step = {_component_of(each): each for each in there}, Upgrade()
        if upgrade is not None and resolution is not None:
            try:
                groups = await self._groups(deployment, planned, there, pods)
            except RequestRefused as refused:
                if refused.is_passing:
                    raise
                step = _all_paused(deployment, planned, current, refused.detail)
            else:
                label = label_of(resolution, upgrade.by) or ""
                step = next_step(groups, upgrade.by, label, serves, now)
                found = [await self._write_cost(pod, cost) for pod, cost in step.costs]
                step = step._replace(refused=[each for each in found if each is not None])
        changed = [
            await self._released(step.workloads.get(name, each), current.get(name, {}))
            if kind_of(each) == WORKLOADS and (name := _component_of(each))
            else each
            for each in planned.manifests
        ]
        return planned._replace(manifests=tuple(changed)), step

    async def pause(self, workloads: Iterable[Manifest]) -> Upgrade:
        """Pause the Deployments that replace workers, since the spec is refused; return a step without
        changes, and soon another if the API server refuses a pause. Raises ClusterError.
        """
        changing = [each for each in workloads if _is_replacing_workers(each)]
        if not changing:
            return Upgrade()
        paused: Manifest = {"paused": True}
        found = [
            await self._merge(WORKLOADS, key_of(each), uid_of(each), {"spec": paused})
            for each in changing
            if not _is_paused(each)
        ]
        refused = [each for each in found if each is not None]
        kept = f"Workers of {named(map(_component_of, changing))} keep the template that they have"
        message = f"paused: the spec is refused, as Ready says. {kept} until it is mended"
        if refused:
            message = f"the spec is refused, and so are requests to pause the upgrade: {joined(refused)}"
        finding = Finding(ConditionStatus.FALSE, "SpecInvalid", message)
        return Upgrade(finding=finding, again_s=LOOK_AGAIN_S if refused else None)

    async def _groups(
        self,
        deployment: DynamoGraphDeployment,
        planned: Plan,
        workloads: Iterable[Manifest],
        pods: Sequence[Pod],
    ) -> list[WorkerGroup]:
        """Return the groups of workers that have a Deployment in the cluster."""
        manifests = {_component_of(each): each for each in planned.manifests if kind_of(each) == WORKLOADS}
        there = {_component_of(each): each for each in workloads}
        staged = [each for each in deployment.spec.components if each.type.is_worker and each.name in there]
        is_done = all(_is_done(each, manifests[each.name], there[each.name]) for each in staged)
        sets = [] if is_done else await self._replica_sets(deployment)
        groups = []
        for component in staged:
            manifest, current = manifests[component.name], there[component.name]
            own = {
                str(labels_of(each).get(TEMPLATE_LABEL)): each
                for each in sets
                if owner_uid_of(each) == uid_of(current)
            }
            new, old = list[Pod](), dict[tuple[str, str], list[Pod]]()
            for pod in pods:
                if pod.labels.get(COMPONENT_LABEL) != component.name or pod.is_over:
                    continue
                template = pod.labels.get(TEMPLATE_LABEL, "")
                of = own.get(template, {})
                if is_done or (of and _template_hash(of) == _template_hash(manifest)):
                    new.append(pod)
                else:
                    created = str(metadata_of(of).get("creationTimestamp"))
                    old.setdefault((created, template), []).append(pod)
            groups.append(
                WorkerGroup(
                    component,
                    manifest,
                    current,
                    old_sets=[old[each] for each in sorted(old)],
                    new=new,
                    warm_up_s=min_ready_s(deployment, component) or 0,
                    deadline_s=component.progress_deadline_seconds or PROGRESS_DEADLINE_S,
                )
            )
        return groups

    async def _replica_sets(self, deployment: DynamoGraphDeployment) -> list[Manifest]:
        """Return the ReplicaSets of a deployment, each with the annotations of its Deployment at its time."""
        name, namespace = deployment.metadata.name, deployment.metadata.namespace
        labels = f"{DEPLOYMENT_LABEL}={selector(name, '')[DEPLOYMENT_LABEL]}"
        return (await self._client.find(REPLICA_SETS, namespace=namespace, labels=labels)).objects

    async def _released(self, planned: Manifest, current: Manifest) -> Manifest:
        """Return a planned Deployment so that it goes on if :meth:`pause` alone paused the current one: what
        an update set stays when an apply no longer states it.
        """
        if _is_paused(planned) or not _is_paused(current):
            return planned
        whole = await self._client.read(WORKLOADS, key_of(current)) or {}  # a watch does not show managers
        holders = holders_of(whole, "paused")
        is_ours = (MANAGER, "Update") in holders and holders <= {(MANAGER, "Update"), (MANAGER, "Apply")}
        return _with(planned, {"paused": False}) if is_ours else planned

    async def _write_cost(self, pod: Pod, cost: str | None) -> str | None:
        """Write a deletion cost; return why it is refused, None if it is not."""
        costs: Manifest = {DELETION_COST: cost}
        return await self._merge(
            PODS, Key(pod.namespace, pod.name), pod.uid, {"metadata": {"annotations": costs}}
        )

    async def _merge(self, kind: ResourceKind, key: Key, uid: str, patch: Manifest) -> str | None:
        """Change the object with this uid; return why it is refused, None if it is not."""
        metadata: Manifest = {**metadata_of(patch), "uid": uid}
        try:
            await self._client.merge(kind, key, {**patch, "metadata": metadata})
        except RequestRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):  # else it ended meanwhile
                if refused.is_passing:
                    raise
                return f"{kind.name} {key.name}: {refused.detail}"
        return None


def _all_paused(
    deployment: DynamoGraphDeployment, planned: Plan, current: Collection[str], why: str
) -> Upgrade:
    """Return the step that pauses the Deployments of all workers, since ReplicaSets cannot be listed."""
    names = {each.name for each in deployment.spec.components if each.type.is_worker}.intersection(current)
    paused = {
        _component_of(each): _with(each, {"paused": True})
        for each in planned.manifests
        if kind_of(each) == WORKLOADS and _component_of(each) in names
    }
    return Upgrade(paused, refused=[f"the list of ReplicaSets: {why}"])


def _is_paused(workload: Manifest) -> bool:
    return bool(fields_of(workload.get("spec")).get("paused"))


def _is_replacing_workers(workload: Manifest) -> bool:
    """Whether a Deployment is one of workers, and some of its pods may not have its newest template."""
    kind, status = str(labels_of(workload).get(TYPE_LABEL)), fields_of(workload.get("status"))
    if kind not in {*ComponentType} or not ComponentType(kind).is_worker:
        return False
    return count_of(status.get("replicas")) > n_updated(workload)


def _is_done(component: ComponentSpec, planned: Manifest, current: Manifest) -> bool:
    """Whether all pods of a Deployment have the planned template."""
    status = component_status(component, current)
    is_written = _template_hash(current) == _template_hash(planned)
    return is_written and status.updated_replicas >= max(status.replicas, stated_replicas(current) or 0)


def _component_of(manifest: Manifest) -> str:
    return str(labels_of(manifest).get(COMPONENT_LABEL))
