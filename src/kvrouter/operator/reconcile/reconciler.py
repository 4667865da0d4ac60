"""Reconciles one deployment: applies its plan, and writes its status and events."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from pydantic import ValidationError

from kvrouter.config.problems import Problem, dotted
from kvrouter.kube.client import CONFLICT, NOT_FOUND, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.informer import Informer
from kvrouter.kube.objects import (
    CORDONS,
    EVENTS,
    Involved,
    Key,
    Manifest,
    ResourceKind,
    event_of,
    key_of,
    metadata_of,
    uid_of,
)
from kvrouter.operator.admission import warnings
from kvrouter.operator.api import (
    API_VERSION,
    KIND,
    ComponentType,
    Condition,
    DeploymentStatus,
    DynamoGraphDeployment,
    Level,
    read_deployment,
)
from kvrouter.operator.cluster_info import PODS, ClusterFacts
from kvrouter.operator.labels import Copy, Pod, backfill_labels, read_node, read_pod
from kvrouter.operator.plan import (
    COMPONENT_LABEL,
    LEVELS_ANNOTATION,
    PACKING_ANNOTATION,
    QOS_ANNOTATION,
    TYPE_LABEL,
    Plan,
    PlanDefaults,
    cordon_manifests,
    fleet_name,
    has_budgets,
    hold_ends_s,
    node_cordon,
    object_name,
    plan,
    read_levels,
    read_qos,
    registers_elsewhere,
    zone_budgets,
)
from kvrouter.operator.plan.manifest import MANAGER
from kvrouter.operator.reconcile.apply import BUDGETS, OWNED, WORKLOADS, Applier, Changes
from kvrouter.operator.reconcile.claims import StatusRefused, takeover_instructions, write_status
from kvrouter.operator.reconcile.link_reader import LinkReader
from kvrouter.operator.reconcile.renames import held_components
from kvrouter.operator.status import (
    NAME_TAKEN_FIX,
    RefusedObjects,
    Workers,
    component_status,
    deployment_status,
    door_of,
    events_of,
    pull_ends_s,
    refused_pods,
    role_mistakes,
    rollout_of,
    unreadable_status,
)
from kvrouter.operator.status.resolved import copy_of


class Recorder:
    """Writes events about deployments. The same one again is counted, not written again.

    ``on_refused`` is called for one that the API server refuses (no right, a quota), which is dropped: what
    has to be known is in the status.
    """

    def __init__(
        self, cluster: KubeClient, identity: str, on_refused: Callable[[RequestRefused], None]
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._on_refused = on_refused
        self._recorded: dict[Key, tuple[str, set[str]]] = {}

    async def record(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Record ``reason``, a stable word in CamelCase, and a sentence. Raises ClusterError."""
        event = self._event(about, reason, message, warns)
        with self._dropping_refused():
            there = await self._cluster.read(EVENTS, key_of(event))
            if there is None:
                await self._cluster.create(EVENTS, event)
                return
            count = there.get("count")
            again: Manifest = {
                "count": (count if isinstance(count, int) else 0) + 1,
                "lastTimestamp": event["lastTimestamp"],
            }
            await self._cluster.merge(EVENTS, key_of(event), again)

    async def record_once(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Record it once for each generation of the spec, however often it is found. Raises ClusterError."""
        generation = f"{uid_of(about)}/{metadata_of(about).get('generation')}"
        known, names = self._recorded.get(key_of(about), ("", set()))
        if known != generation:
            names = set()
        event = self._event(about, reason, message, warns, generation)
        name = key_of(event).name
        if name in names:
            return
        with self._dropping_refused():
            if await self._cluster.read(EVENTS, key_of(event)) is None:
                await self._cluster.create(EVENTS, event)
        self._recorded[key_of(about)] = (generation, names | {name})

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone."""
        self._recorded.pop(key, None)

    @contextmanager
    def _dropping_refused(self) -> Iterator[None]:
        try:
            yield
        except RequestRefused as refused:
            if refused.is_passing:
                raise
            self._on_refused(refused)

    def _event(
        self, about: Manifest, reason: str, message: str, warns: bool, generation: str = ""
    ) -> Manifest:
        return event_of(
            Involved(API_VERSION, KIND, key_of(about), uid_of(about)),
            reason,
            message,
            warns=warns,
            reporter=MANAGER,
            instance=self._identity,
            now=datetime.now(UTC),
            digest_of=generation,
        )


WARNINGS_REPORTED_MAX = 20
SET_BACK = (
    "was scaled by somebody else, and is set back to the replicas that its component states: leave replicas "
    "out of spec.components where an autoscaler or kubectl scale has the say"
)

POLICY_REFUSED = (
    "the operator labels workers after their binding, since the API server refuses the policy that labels "
    "them in the same write"
)


class NameTaken(ClusterError):
    """An object is where one of a deployment belongs, and is not that deployment's."""

    code = "name_taken"


class AwaitingGarbageCollection(ClusterError):
    """Objects of a deleted deployment of the same name are still there."""

    code = "awaiting_garbage_collection"


class WriteRefused(ClusterError):
    """The API server did not take an object of a deployment."""

    code = "write_refused"


class ControllerListener(Protocol):
    """Is notified of what the controller and its reconciler do."""

    def changed(self, key: Key, changes: Changes) -> None:
        """Objects of this deployment were written."""

    def labelled(self, pod: Key) -> None:
        """A pod got the labels of its node late."""

    def looked(self, key: Key, duration_s: float, error: Exception | None, retry_s: float) -> None:
        """A reconcile of a deployment ended; with ``error`` it is tried again in ``retry_s`` seconds."""

    def stood_back(self, key: Key, holder: str | None) -> None:
        """Another operator manages a deployment; with None this one does, or nobody has to any more."""

    def conditions_are(self, key: Key, conditions: Iterable[Condition]) -> None:
        """A deployment has these conditions; without any it is gone, or another operator's."""

    def event_refused(self, error: RequestRefused) -> None:
        """The API server refused an event, which is dropped."""

    def waiting(self, deployments: int) -> None:
        """So many deployments wait to be reconciled."""

    def lost(self, kind: ResourceKind, error: ClusterError | None) -> None:
        """This kind cannot be watched; with None it can again."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What is watched. ``pods`` are grouped by their deployment; ``nodes`` may never come where they may not
    be read. ``workers`` returns those that are registered in a fleet; it is given which pods are there.
    ``links`` reads what frontends learned.
    """

    deployments: Informer[None]
    pods: Informer[Key]
    nodes: Informer[None]
    workers: Callable[[Key, Callable[[str], bool]], Workers]
    links: LinkReader


class Reconciler:
    """Reconciles deployments; no two calls at a time for the same one."""

    def __init__(
        self,
        cluster: KubeClient,
        seen: ClusterView,
        applied: Applier,
        *,
        defaults: PlanDefaults,
        recorder: Recorder,
        listener: ControllerListener,
        name: str,
    ) -> None:
        self._cluster, self._seen, self._applied = cluster, seen, applied
        self._defaults, self._recorder, self._listener = defaults, recorder, listener
        self._name = name
        self._written: dict[Key, tuple[str, DeploymentStatus]] = {}

    async def reconcile(self, key: Key, facts: ClusterFacts, *, policy_refused: str = "") -> float | None:
        """Reconcile the deployment at ``key``; return in how many seconds it is to be reconciled again though
        nothing changes, None when it need not. Raises ClusterError when that is to be done again at once.

        ``policy_refused`` is what the API server says where it refuses the binding policy of its workers.
        """
        found = self._seen.deployments.get(key)
        if found is None or metadata_of(found).get("deletionTimestamp"):
            self._applied.forget(key)  # what it owns goes with it: Kubernetes sees to that
            self._recorder.forget(key)
            self._seen.links.forget(key)
            self._written.pop(key, None)
            self._listener.conditions_are(key, ())
            return None
        reading = read_deployment(found)
        before = self._status_before(found)
        if reading.deployment is None:
            generation = _generation_of(found)
            now = datetime.now(UTC)
            status = unreadable_status(generation, reading.problems, previous=before, now=now)
            await self._write(found, before, status)
            return None
        deployment = reading.deployment
        planned = plan(
            deployment,
            facts,
            self._defaults,
            last_levels=last_levels(self._applied, found),
            last_qos=read_qos(_annotation(self._applied, found, QOS_ANNOTATION)),
            last_pack_levels=[
                level
                for text in _annotations(self._applied, found, PACKING_ANNOTATION)
                for level in read_levels(text)
            ],
        )
        changes, again_s = Changes(), None
        pods = [pod for pod in map(read_pod, self._seen.pods.of_group(key)) if pod is not None]
        cordons = self._node_cordons(deployment)
        if planned.problems:  # its pods serve on as they were, and keep away from nodes that are cordoned
            if cordons is not None:
                others = [kind for kind in OWNED if kind != CORDONS]
                changes = await self._applied.apply(key, uid_of(found), cordons, kept=others)
        else:
            now = datetime.now(UTC)
            budgets = self._zone_budgets(found, deployment, planned, pods, now)
            workloads_there = self._applied.objects_of(found, WORKLOADS)
            held = held_components(deployment, workloads_there, now, self._defaults.disruption_hold_s)
            hold_s = hold_ends_s(budgets, now, self._defaults.disruption_hold_s)
            ends_s = (held.ends_s, hold_s, pull_ends_s(pods, now))
            again_s = min((each for each in ends_s if each is not None), default=None)
            changes = await self._applied.apply(
                key,
                uid_of(found),
                (*planned.manifests, *budgets, *(cordons or ())),
                kept=(CORDONS,) if cordons is None else (),
                held=held.components,
            )
            if changes.are_any:
                self._listener.changed(key, changes)
        unlabelled: list[str] = []
        if planned.resolution is not None:
            copies = planned.resolution.copies
            pods = [
                await self._labelled(pod, copies, unlabelled) if _is_placed(pod, planned) else pod
                for pod in pods
            ]
        workloads = {key_of(each).name: each for each in self._applied.objects_of(found, WORKLOADS)}
        pairs = [
            (component, workloads[name])
            for component in deployment.spec.components
            if (name := object_name(deployment.metadata.name, component.name)) in workloads
        ]
        refused_of = [refused_pods(component, workload) for component, workload in pairs]
        refusals = RefusedObjects(
            writes=[*map(str, changes.refused)],
            are_lasting=any(each.is_lasting for each in changes.refused),
            taken=[*map(str, changes.taken)],
            pods=[refused for refused in refused_of if refused is not None],
            labels=unlabelled,
        )
        workers = self._workers_of(deployment, pods)
        status = deployment_status(
            deployment,
            planned,
            facts,
            components=[component_status(component, workload) for component, workload in pairs],
            pods=pods,
            previous=before,
            now=datetime.now(UTC),
            refusals=refusals,
            workers=workers,
            links=self._seen.links.follow(key, door_of(planned, pods), before),
            rollouts=[
                rollout_of(component, key_of(workload).name, workload) for component, workload in pairs
            ],
        )
        await self._write(found, before, status)
        await self._record_changes(found, changes)
        for warned in changes.warned[:WARNINGS_REPORTED_MAX]:
            await self._recorder.record_once(found, "ApiServerWarning", warned, warns=True)
        await self._warn(found, warnings(reading, planned, facts))
        for mistake in role_mistakes(pods, workers):
            await self._recorder.record_once(found, "RoleMismatch", mistake, warns=True)
        if policy_refused:
            message = f"{POLICY_REFUSED}: {policy_refused}"
            await self._recorder.record_once(found, "BindingPolicyRefused", message, warns=True)
        if changes.taken:
            await self._name_taken(found, changes)
        if refusals.writes or refusals.labels:
            raise WriteRefused("; ".join((*refusals.writes, *refusals.labels)))
        if changes.awaiting_gc:
            there = ", ".join(map(str, changes.awaiting_gc))
            raise AwaitingGarbageCollection(
                f"{there}: still there of a deployment of this name that was deleted"
            )
        return again_s

    async def report_status_refused(self, key: Key, refused: StatusRefused) -> None:
        """Write the event of a refused status, which is the only place left in the cluster. Raises
        ClusterError.
        """
        found = self._seen.deployments.get(key)
        if found is not None:
            message = f"the API server refuses the status of this deployment: {refused.message}"
            await self._recorder.record_once(found, "StatusRefused", message, warns=True)

    async def leave(self, key: Key, holder: str) -> None:
        """Another operator manages the deployment at ``key``: record it, and forget what was written."""
        found = self._seen.deployments.get(key)
        self._applied.forget(key)
        self._seen.links.forget(key)
        self._written.pop(key, None)
        self._listener.conditions_are(key, ())
        if found is not None:
            said = takeover_instructions(self._name, holder, *key)
            await self._recorder.record_once(found, "OtherOperator", said, warns=True)

    def _zone_budgets(
        self,
        found: Manifest,
        deployment: DynamoGraphDeployment,
        planned: Plan,
        pods: Sequence[Pod],
        now: datetime,
    ) -> list[Manifest]:
        """What a drain leaves of the workers that are Ready in each of the policy's domains."""
        if planned.policy is None or planned.resolution is None or not has_budgets(deployment):
            return []
        label = copy_of(planned.policy, planned.resolution).pod_label
        there = self._applied.objects_of(found, BUDGETS)
        budgets: list[Manifest] = []
        for component in deployment.spec.components:
            if component.type.is_worker:
                ready = Counter(
                    pod.labels[label]
                    for pod in pods
                    if pod.labels.get(COMPONENT_LABEL) == component.name
                    and pod.labels.get(label)
                    and pod.is_ready
                    and not pod.is_over
                )
                hold_s = self._defaults.disruption_hold_s
                budgets += zone_budgets(deployment, component, label, ready, there, now, hold_s)
        return budgets

    def _node_cordons(self, deployment: DynamoGraphDeployment) -> list[Manifest] | None:
        """The cordons that annotations of nodes ask for; None while that is not known, or the kind is not."""
        if not self._applied.knows(CORDONS) or not self._seen.nodes.synced.is_set():
            return None
        cordons = [cordon for cordon in map(node_cordon, self._seen.nodes.all()) if cordon is not None]
        return cordon_manifests(deployment, self._defaults, cordons)

    def is_own_status(self, found: Manifest) -> bool:
        """Whether the status that a watch shows is the one that was written last."""
        return self._written.get(key_of(found)) == (uid_of(found), _status_of(found))

    def _workers_of(self, deployment: DynamoGraphDeployment, pods: Sequence[Pod]) -> Workers:
        elsewhere = registers_elsewhere(deployment.spec)
        if elsewhere is not None:
            return Workers(unknown_because=elsewhere)
        there = {pod.name for pod in pods if not pod.is_over}
        gone = {pod.name for pod in pods if pod.is_over}
        namespace, name = deployment.metadata.namespace, deployment.metadata.name
        found = self._seen.workers(Key(namespace, fleet_name(namespace, name)), there.__contains__)
        kept = tuple(each for each in found.registered if each.pod not in gone)
        return Workers(kept, found.unknown_because)

    def _status_before(self, found: Manifest) -> DeploymentStatus | None:
        """What was written last, which a watch may not have shown yet."""
        uid, status = self._written.get(key_of(found), ("", None))
        return status if uid == uid_of(found) else _status_of(found)

    async def _write(
        self, found: Manifest, before: DeploymentStatus | None, status: DeploymentStatus
    ) -> None:
        self._listener.conditions_are(key_of(found), status.conditions)
        status = status.model_copy(update={"operator": self._name})
        if status == before == _status_of(found):
            return
        key = key_of(found)
        known = self._written.get(key)
        self._written[key] = (uid_of(found), status)  # a watch may show it before this call ends
        is_written = False
        try:
            manifest = status.model_dump(mode="json", by_alias=True, exclude_none=True)
            await write_status(self._cluster, found, manifest)
            is_written = True
        except RequestRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                raise
            return  # it was deleted meanwhile
        finally:
            if not is_written:
                self._restore(key, known)
        for event in events_of(before, status):
            await self._recorder.record(found, event.reason, event.note, warns=event.type.value != "Normal")

    def _restore(self, key: Key, known: tuple[str, DeploymentStatus] | None) -> None:
        if known is None:
            self._written.pop(key, None)
        else:
            self._written[key] = known

    async def _warn(self, found: Manifest, problems: Sequence[Problem]) -> None:
        """Record what the user wrote and does not get, as it is written."""
        messages = [f"{dotted(problem.path)} {problem.must}" for problem in problems[:WARNINGS_REPORTED_MAX]]
        if len(problems) > WARNINGS_REPORTED_MAX:
            messages.append(f"and {len(problems) - WARNINGS_REPORTED_MAX} warnings more")
        for message in messages:
            await self._recorder.record_once(found, "SpecWarning", message, warns=True)

    async def _record_changes(self, found: Manifest, changes: Changes) -> None:
        if not changes.are_any:
            return
        parts = [f"{verb} {', '.join(map(str, places))}" for verb, places in changes.done.items()]
        await self._recorder.record(found, "Applied", "; ".join(parts))
        for place in changes.set_back:
            await self._recorder.record(found, "ReplicasSetBack", f"{place} {SET_BACK}", warns=True)

    async def _name_taken(self, found: Manifest, changes: Changes) -> None:
        message = f"{', '.join(map(str, changes.taken))}: {NAME_TAKEN_FIX}"
        await self._recorder.record(found, "NameTaken", message, warns=True)
        raise NameTaken(message)

    async def _labelled(self, pod: Pod, copies: Sequence[Copy], refused_of: list[str]) -> Pod:
        """Return the pod with the labels of its node, which it is given where it lacks them. What the API
        server says when it does not take them is added to ``refused_of``.
        """
        if pod.node_name is None:
            return pod
        found = self._seen.nodes.get(Key("", pod.node_name))
        node = None if found is None else read_node(found)
        patch = None if node is None else backfill_labels(pod, node, copies).patch
        if patch is None:
            return pod
        place = Key(pod.namespace, pod.name)
        try:
            patched = await self._cluster.merge(PODS, place, patch)
        except RequestRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                if refused.is_passing:
                    raise
                refused_of.append(f"Pod {pod.name}: {refused.said}")
            return pod
        self._listener.labelled(place)
        return read_pod(patched) or pod


def last_levels(applied: Applier, found: Manifest) -> tuple[Level, ...]:
    """Return the levels that a deployment's workers were planned with last; none when there are none."""
    return read_levels(_annotation(applied, found, LEVELS_ANNOTATION))


def _annotation(applied: Applier, found: Manifest, name: str) -> str | None:
    """The first that is there of an annotation of a deployment's Deployments."""
    return next(_annotations(applied, found, name), None)


def _annotations(applied: Applier, found: Manifest, name: str) -> Iterator[str]:
    """What a deployment's Deployments have of an annotation."""
    for workload in applied.objects_of(found, WORKLOADS):
        annotations = metadata_of(workload).get("annotations")
        text = annotations.get(name) if isinstance(annotations, dict) else None
        if isinstance(text, str):
            yield text


def _is_placed(pod: Pod, planned: Plan) -> bool:
    """Whether a pod gets the labels of its node."""
    kind = pod.labels.get(TYPE_LABEL)
    return kind is not None and (planned.places_frontends or kind != ComponentType.FRONTEND)


def node_name_of(pod: Manifest) -> str:
    """Return the node that a pod is bound to, empty when it is bound to none."""
    spec = pod.get("spec")
    name = spec.get("nodeName") if isinstance(spec, dict) else None
    return name if isinstance(name, str) else ""


def _status_of(found: Manifest) -> DeploymentStatus | None:
    """What was written last; None when nothing was, or when it can no longer be read."""
    if not found.get("status"):
        return None
    try:
        return DeploymentStatus.model_validate(found["status"], by_alias=True, by_name=False)
    except ValidationError:
        return None


def _generation_of(found: Manifest) -> int:
    generation = metadata_of(found).get("generation")
    return generation if isinstance(generation, int) else 0
