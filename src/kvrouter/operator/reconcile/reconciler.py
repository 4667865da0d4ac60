"""The reconciler: every step for one deployment, from its claim to its status and events."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from kvrouter.kube.client import CONFLICT, NOT_FOUND, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.objects import (
    CORDONS,
    Key,
    Manifest,
    annotations_of,
    fields_of,
    key_of,
    metadata_of,
    uid_of,
)
from kvrouter.operator.admission.validate import warnings
from kvrouter.operator.api.deployment import ComponentType, DynamoGraphDeployment, read_deployment
from kvrouter.operator.api.grove import Level
from kvrouter.operator.cluster_info import PODS, ClusterInfo
from kvrouter.operator.instrumentation import OperatorInstrumentation
from kvrouter.operator.labels.binding import backfill_labels
from kvrouter.operator.labels.pods import Pod, read_node, read_pod
from kvrouter.operator.plan.budgets import has_budgets, hold_ends_s, zone_budgets
from kvrouter.operator.plan.containers import registers_elsewhere
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.frontend_links import read_qos
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, TYPE_LABEL, fleet_name, object_name
from kvrouter.operator.plan.node_cordons import cordon_manifests, node_cordon
from kvrouter.operator.plan.packing import PACKING_ANNOTATION
from kvrouter.operator.plan.plan import LEVELS_ANNOTATION, QOS_ANNOTATION, Plan, plan, read_levels
from kvrouter.operator.reconcile.apply import BUDGETS, OWNED, WORKLOADS, Applier, Changes
from kvrouter.operator.reconcile.bindings import (
    Bindings,
    BindingsReconciler,
    WantedLabels,
    is_known,
    wanted_by,
)
from kvrouter.operator.reconcile.claims import Claims, takeover_instructions
from kvrouter.operator.reconcile.renames import held_components
from kvrouter.operator.reconcile.sources import Sources, spec_of
from kvrouter.operator.reconcile.status_writer import StatusRefused, StatusWriter
from kvrouter.operator.reconcile.upgrades import Serving, Upgrade, Upgrades, unavailable_by
from kvrouter.operator.status.available import Workers, role_mistakes
from kvrouter.operator.status.link_status import metrics_endpoint
from kvrouter.operator.status.resolved import (
    NAME_TAKEN_FIX,
    RefusedObjects,
    component_status,
    policy_level,
    refused_pods,
)
from kvrouter.operator.status.stalled import pull_ends_s, rollout_of
from kvrouter.operator.status.status import deployment_status, unreadable_status

POLICY_REFUSED = (
    "the operator labels workers after their binding, since the API server refuses the policy that labels "
    "them in the same write"
)


class NotApplied(ClusterError):
    """An object of a deployment was not written: its place is taken, or the API server refuses it."""

    code = "not_applied"


class Reconciler:
    """Reconciles deployments; calls for one deployment must not overlap."""

    def __init__(
        self,
        client: KubeClient,
        sources: Sources,
        claims: Claims,
        statuses: StatusWriter,
        *,
        defaults: PlanDefaults,
        instrumentation: OperatorInstrumentation,
    ) -> None:
        self._client, self._sources, self._claims = client, sources, claims
        self._statuses, self._recorder = statuses, statuses.recorder
        self._defaults, self._instrumentation = defaults, instrumentation
        self._applied = Applier(client, sources.owned)
        self._bindings = Bindings(client, claims.lease)
        self._upgrades = Upgrades(client)
        self.policies = BindingsReconciler(self._bindings, sources, self._wanted_labels)
        self.others: dict[Key, str] = {}
        """The deployments that another operator manages, and its name."""
        self._asked: dict[Key, object] = {}
        """The deployments for which topologies were read again, with their spec at that time."""

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile the deployment at ``key``; return in how many seconds it is to be reconciled again
        without a change, None if it need not. Raises ClusterError if it is to be reconciled again at once.
        """
        try:
            if await self._is_anothers(key):
                return None
            await self._know_topology(key)
            await self.policies.write_due()
            return await self._reconcile_own(key)
        except Exception as error:
            self._applied.forget(key)
            manifest = self._sources.deployments.get(key)
            if manifest is not None and isinstance(error, StatusRefused):  # only an event can report it
                message = f"the API server refuses the status of this deployment: {error.message}"
                with suppress(ClusterError):  # the log has the refused status, which explains more
                    await self._recorder.record_once(manifest, "StatusRefused", message, warns=True)
            raise

    def write_again(self) -> None:
        """Apply everything the next time, whatever other clients changed meanwhile."""
        self._applied.forget()
        self._bindings.forget()

    async def _is_anothers(self, key: Key) -> bool:
        """Whether another operator manages a deployment, which this one then leaves alone."""
        manifest = self._sources.deployments.get(key)
        holder = None if manifest is None or _is_leaving(manifest) else await self._claims.other(manifest)
        if holder != self.others.get(key):
            self._sources.bindings_are_due = True
            self._instrumentation.stood_back(key, holder)
        if manifest is None or holder is None:
            self.others.pop(key, None)
            return False
        self.others[key] = holder
        self._forget(key)
        message = takeover_instructions(self._claims.name, holder, *key)
        await self._recorder.record_once(manifest, "OtherOperator", message, warns=True)
        return True

    def _forget(self, key: Key) -> None:
        self._applied.forget(key)
        self._sources.frontends.forget(key)
        self._statuses.forget(key)

    async def _know_topology(self, key: Key) -> None:
        """Read topologies again for a deployment that names an unknown one: it may be new."""
        manifest = self._sources.deployments.get(key)
        spec = None if manifest is None else spec_of(manifest)
        if manifest and self._asked.get(key) != spec and not is_known(manifest, self._sources.cluster_info):
            self._asked[key] = spec
            await self._sources.info_reader.read()

    def _wanted_labels(self, manifest: Manifest) -> WantedLabels | None:
        if key_of(manifest) in self.others:
            return None
        return wanted_by(manifest, self._sources.cluster_info, self._last_levels(manifest))

    async def _reconcile_own(self, key: Key) -> float | None:
        manifest = self._sources.deployments.get(key)
        if manifest is None or _is_leaving(manifest):
            self._forget(key)  # Kubernetes deletes its objects with it
            self._recorder.forget(key)
            if manifest is None:
                self._claims.forget(key)
                self._asked.pop(key, None)
            return None
        reading, cluster_info = read_deployment(manifest), self._sources.cluster_info
        before = self._statuses.before(manifest)
        deployment = reading.deployment
        there, now = self._applied.objects_of(manifest, WORKLOADS), datetime.now(UTC)
        if deployment is None:
            is_staged = fields_of(manifest.get("spec")).get("upgrade") is not None
            step = await self._upgrades.pause(there) if is_staged else Upgrade()
            generation = _generation_of(manifest)
            status = unreadable_status(
                generation, reading.problems, previous=before, now=now, upgrading=step.finding
            )
            await self._statuses.write(manifest, status)
            return step.again_s
        planned = self._plan(manifest, deployment, cluster_info)
        pods = [pod for pod in map(read_pod, self._sources.pods.of_group(key)) if pod is not None]
        workers = self._workers_of(deployment, pods)
        frontend = self._sources.frontends.follow(key, metrics_endpoint(planned, pods), before)
        domain = "" if planned.policy is None else planned.policy.domain
        serves = Serving(unavailable_by(before), frontend.passed_over, workers.registered, domain)
        planned, step = await self._upgrades.stage(deployment, planned, there, pods, serves, now)
        changes, again_s = await self._apply(manifest, deployment, planned, pods)
        unlabelled: list[str] = []
        pods = [await self._labelled(pod, planned, unlabelled) for pod in pods]
        workloads = {key_of(each).name: each for each in self._applied.objects_of(manifest, WORKLOADS)}
        pairs = [
            (component, workloads[name])
            for component in deployment.spec.components
            if (name := object_name(deployment.metadata.name, component.name)) in workloads
        ]
        refused_of = [refused_pods(component, workload) for component, workload in pairs]
        refusals = RefusedObjects(
            writes=[*map(str, changes.refused), *step.refused],
            are_lasting=any(each.is_lasting for each in changes.refused) or bool(step.refused),
            taken=[*map(str, changes.taken)],
            pods=[refused for refused in refused_of if refused is not None],
            labels=unlabelled,
        )
        status = deployment_status(
            deployment,
            planned,
            cluster_info,
            components=[component_status(component, workload) for component, workload in pairs],
            pods=pods,
            previous=before,
            now=datetime.now(UTC),
            refusals=refusals,
            workers=workers,
            links=frontend.links,
            rollouts=[rollout_of(component, key_of(each).name, each) for component, each in pairs],
            upgrading=step.finding,
        )
        await self._statuses.write(manifest, status)
        await self._recorder.record_changes(manifest, changes)
        await self._recorder.record_warnings(manifest, warnings(reading, planned, cluster_info))
        for mistake in role_mistakes(pods, workers):
            await self._recorder.record_once(manifest, "RoleMismatch", mistake, warns=True)
        await self._report_refused(manifest, changes, refusals)
        return min((each for each in (again_s, step.again_s) if each is not None), default=None)

    def _plan(self, manifest: Manifest, deployment: DynamoGraphDeployment, cluster_info: ClusterInfo) -> Plan:
        """Plan a deployment, with the levels and links of its last plan."""
        return plan(
            deployment,
            cluster_info,
            self._defaults,
            last_levels=self._last_levels(manifest),
            last_qos=read_qos(next(self._annotations(manifest, QOS_ANNOTATION), None)),
            last_pack_levels=[
                level
                for text in self._annotations(manifest, PACKING_ANNOTATION)
                for level in read_levels(text)
            ],
        )

    async def _apply(
        self, manifest: Manifest, deployment: DynamoGraphDeployment, planned: Plan, pods: Sequence[Pod]
    ) -> tuple[Changes, float | None]:
        """Write the plan; return the changes, and in how many seconds the next hold ends or the next pod
        counts as unable to start.
        """
        key, now = key_of(manifest), datetime.now(UTC)
        cordons = self._node_cordons(deployment)
        if planned.problems:  # its pods serve on unchanged, and cordons still apply
            if cordons is None:
                return Changes(), None
            others = [kind for kind in OWNED if kind != CORDONS]
            return await self._applied.apply(key, uid_of(manifest), cordons, kept=others), None
        budgets = self._zone_budgets(manifest, deployment, planned, pods, now)
        workloads_there = self._applied.objects_of(manifest, WORKLOADS)
        held = held_components(deployment, workloads_there, now, self._defaults.disruption_hold_s)
        hold_s = hold_ends_s(budgets, now, self._defaults.disruption_hold_s)
        ends_s = (held.ends_s, hold_s, pull_ends_s(pods, now))
        changes = await self._applied.apply(
            key,
            uid_of(manifest),
            (*planned.manifests, *budgets, *(cordons or ())),
            kept=(CORDONS,) if cordons is None else (),
            held=held.components,
        )
        if changes.done:
            self._instrumentation.changed(key, changes)
        return changes, min((each for each in ends_s if each is not None), default=None)

    async def _report_refused(self, manifest: Manifest, changes: Changes, refusals: RefusedObjects) -> None:
        """Record the refusals; raise NotApplied if an object was not written, and is to be tried again."""
        policy_refused = self._bindings.refused.get(key_of(manifest))
        if policy_refused:
            message = f"{POLICY_REFUSED}: {policy_refused}"
            await self._recorder.record_once(manifest, "BindingPolicyRefused", message, warns=True)
        if changes.taken:
            message = f"{', '.join(map(str, changes.taken))}: {NAME_TAKEN_FIX}"
            await self._recorder.record(manifest, "NameTaken", message, warns=True)
            raise NotApplied(message)
        if refusals.writes or refusals.labels:
            raise NotApplied("; ".join((*refusals.writes, *refusals.labels)))
        if changes.awaiting_gc:
            there = ", ".join(map(str, changes.awaiting_gc))
            raise NotApplied(f"{there}: still there of a deployment of this name that was deleted")

    def _zone_budgets(
        self,
        manifest: Manifest,
        deployment: DynamoGraphDeployment,
        planned: Plan,
        pods: Sequence[Pod],
        now: datetime,
    ) -> list[Manifest]:
        """Return budgets for the Ready workers in each of the policy's domains."""
        if planned.policy is None or planned.resolution is None or not has_budgets(deployment):
            return []
        label = policy_level(planned.policy, planned.resolution).pod_label
        there = self._applied.objects_of(manifest, BUDGETS)
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
        """Return the cordons in nodes' annotations; None while nodes, or the kind of cordons, are unknown."""
        if not self._applied.knows(CORDONS) or not self._sources.nodes.synced.is_set():
            return None
        cordons = [cordon for cordon in map(node_cordon, self._sources.nodes.all()) if cordon is not None]
        return cordon_manifests(deployment, self._defaults, cordons)

    def _workers_of(self, deployment: DynamoGraphDeployment, pods: Sequence[Pod]) -> Workers:
        elsewhere = registers_elsewhere(deployment.spec)
        if elsewhere is not None:
            return Workers(unknown_because=elsewhere)
        there = {pod.name for pod in pods if not pod.is_over}
        gone = {pod.name for pod in pods if pod.is_over}
        namespace, name = deployment.metadata.namespace, deployment.metadata.name
        found = self._sources.workers_of(Key(namespace, fleet_name(namespace, name)), there.__contains__)
        kept = tuple(each for each in found.registered if each.pod not in gone)
        return Workers(kept, found.unknown_because)

    async def _labelled(self, pod: Pod, planned: Plan, refused_of: list[str]) -> Pod:
        """Return the pod with the labels of its node, which are written if it lacks them. Refusals of the API
        server are added to ``refused_of``.
        """
        kind = pod.labels.get(TYPE_LABEL)
        is_placed = kind is not None and (planned.places_frontends or kind != ComponentType.FRONTEND)
        if planned.resolution is None or pod.node_name is None or not is_placed:
            return pod
        found = self._sources.nodes.get(Key("", pod.node_name))
        node = None if found is None else read_node(found)
        patch = None if node is None else backfill_labels(pod, node, planned.resolution.level_labels).patch
        if patch is None:
            return pod
        place = Key(pod.namespace, pod.name)
        try:
            patched = await self._client.merge(PODS, place, patch)
        except RequestRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                if refused.is_passing:
                    raise
                refused_of.append(f"Pod {pod.name}: {refused.detail}")
            return pod
        self._instrumentation.labelled(place)
        return read_pod(patched) or pod

    def _last_levels(self, manifest: Manifest) -> tuple[Level, ...]:
        """Return the levels that a deployment's workers were planned with last; empty without any."""
        return read_levels(next(self._annotations(manifest, LEVELS_ANNOTATION), None))

    def _annotations(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Yield the values of an annotation on a deployment's Deployments."""
        for workload in self._applied.objects_of(manifest, WORKLOADS):
            text = annotations_of(workload).get(name)
            if isinstance(text, str):
                yield text


def _is_leaving(manifest: Manifest) -> bool:
    return bool(metadata_of(manifest).get("deletionTimestamp"))


def _generation_of(manifest: Manifest) -> int:
    generation = metadata_of(manifest).get("generation")
    return generation if isinstance(generation, int) else 0
