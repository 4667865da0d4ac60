"""The plan: every manifest of one deployment, in one order, from arguments alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvrouter.operator.api.deployment import ComponentSpec, ComponentType, DynamoGraphDeployment
from kvrouter.operator.api.grove import Level
from kvrouter.operator.api.names import level_problem
from kvrouter.operator.api.qos import NetworkQoS
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.level_labels import LevelLabels, Resolution, label_of, resolve
from kvrouter.operator.plan.account import accounts, give_account
from kvrouter.operator.plan.budgets import budget_warnings, component_budget, has_budgets
from kvrouter.operator.plan.containers import complete, http_port
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.frontend_links import (
    ASSUMED,
    FrontendLinks,
    frontend_links,
    level_problems,
    qos_of_topology,
    qos_text,
)
from kvrouter.operator.plan.manifest import Manifest, labels_of
from kvrouter.operator.plan.network import network_policy
from kvrouter.operator.plan.packing import (
    PACKING_ANNOTATION,
    Packing,
    pack,
    packed_labels,
    read_packings,
)
from kvrouter.operator.plan.pod_template import PodDraft, overruled_sources, read_pod_template
from kvrouter.operator.plan.programs import role_problems, unregistered
from kvrouter.operator.plan.shared import OWN_LABEL, SharedEnv, give_shared, read_env, shared_problems
from kvrouter.operator.plan.transfer_policy import (
    FrontendPlace,
    add_frontend_policy,
    add_worker_policy,
    frontend_place,
    names_of_policy,
    place_frontend,
)
from kvrouter.operator.plan.workload import rollout_problems, service, workload
from kvrouter.operator.policy import DeploymentPolicy, FrontendSettings, read_policy
from kvrouter.settings.problems import Path, Problem

LEVELS_ANNOTATION = "kvrouter.dev/topology-levels"
"""Annotation of worker Deployments: the levels that they were planned with, ``domain=node label,…``."""

QOS_ANNOTATION = "kvrouter.dev/topology-network-qos"
"""Annotation of frontend Deployments: the links that their topology stated, in its own form."""


class Plan(NamedTuple):
    """The objects that the cluster should hold. With problems there are no manifests, and nothing is changed.

    ``warnings`` are about user-written fields without effect. Without a policy ``policy`` and ``resolution``
    are None. ``places_frontends``: frontend pods get the labels of their nodes, as worker pods do.
    """

    manifests: tuple[Manifest, ...]
    warnings: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()
    policy: DeploymentPolicy | None = None
    resolution: Resolution | None = None
    places_frontends: bool = False


def plan(
    deployment: DynamoGraphDeployment,
    cluster_info: ClusterInfo,
    defaults: PlanDefaults,
    *,
    last_levels: Sequence[Level] = (),
    last_qos: NetworkQoS | None = None,
    last_pack_levels: Sequence[Level] = (),
) -> Plan:
    """Return the manifests of ``deployment``: the accounts of its processes, then a Deployment for each
    component, a Service for each frontend, a budget for each component that is not counted by zone, and
    NetworkPolicies if enabled.

    A policy that cannot be determined stops planning: KV would go anywhere. ``last_levels``, ``last_qos`` and
    ``last_pack_levels`` are the values of :data:`LEVELS_ANNOTATION`, :data:`QOS_ANNOTATION` and
    :data:`PACKING_ANNOTATION` in the cluster. They hold while the topology cannot be found, so that its
    deletion rolls no pods.
    """
    reading = read_policy(deployment.spec)
    policy = reading.policy
    resolution = None if policy is None else resolve(policy, cluster_info, last_levels)
    problems, manifests = [*reading.problems], accounts(deployment, defaults)
    packings, unpacked = read_packings(deployment.spec, cluster_info, policy, last_pack_levels)
    warnings = [*budget_warnings(deployment), *unpacked]
    of_topology, links, place = None, FrontendLinks(), None
    if policy is not None and resolution is not None:
        warnings += _left_out(reading.settings, policy, resolution)
        of_topology = qos_of_topology(policy, resolution, cluster_info, last_qos)
        links, found = frontend_links(reading.settings, of_topology, resolution)
        place, unplaced = frontend_place(reading.settings, policy, resolution)
        warnings += [*found, *unplaced]
    labels_of_nodes = () if resolution is None else [level.pod_label for level in resolution.level_labels]
    problems += shared_problems(deployment.spec, labels_of_nodes)
    env = read_env(deployment.spec, names_of_policy(policy, links, place))
    warnings += env.warnings
    drafting = _Drafting(deployment, defaults, policy, resolution, links, place, of_topology, env, packings)
    problems += _upgrade_problems(deployment, resolution)
    for index, component in enumerate(deployment.spec.components):
        problems += drafting.add(component, ("spec", "components", index))
    drafts = drafting.drafts
    problems += pack(deployment, {component.name: draft for component, draft, _ in drafts}, packings)
    for component, draft, annotations in drafts:
        manifests += _of_component(deployment, component, draft, annotations, policy)
        if defaults.network_policies:
            manifests.append(network_policy(deployment, component, draft, defaults))
        warnings += draft.warnings
    if drafting.assumes:
        warnings.append(Problem(reading.settings.weight_at, ASSUMED))
    if problems:
        return Plan((), tuple(warnings), tuple(problems), policy, resolution)
    return Plan(tuple(manifests), tuple(warnings), (), policy, resolution, place is not None)


@dataclass
class _Drafting:
    """Drafts the pod templates of a deployment's components, one after the other."""

    deployment: DynamoGraphDeployment
    defaults: PlanDefaults
    policy: DeploymentPolicy | None
    resolution: Resolution | None
    links: FrontendLinks
    place: FrontendPlace | None
    of_topology: NetworkQoS | None
    env: SharedEnv
    packings: Mapping[str, Packing]
    drafts: list[tuple[ComponentSpec, PodDraft, Manifest]] = field(default_factory=list)
    """Each readable component, its template, and the annotations of its objects."""
    assumes: bool = False
    """Whether a frontend weighs links that are assumed, not stated."""

    def add(self, component: ComponentSpec, at: Path) -> list[Problem]:
        """Draft the next component; return its problems."""
        deployment, defaults = self.deployment, self.defaults
        problems = rollout_problems(deployment, component, at)
        draft = read_pod_template(component, at)
        if isinstance(draft, list):
            return problems + draft
        written = replace(draft, containers=[*draft.containers], init_containers=[*draft.init_containers])
        draft.warnings += unregistered(draft, component.type)
        problems += role_problems(draft, component.type)
        problems += complete(draft, deployment, component, defaults, self.env.entries)
        give_account(draft, deployment, component.type, defaults)
        annotations = self._add_policy(draft, component)
        give_shared(draft, deployment.spec, self.env)
        draft.warnings += overruled_sources(written, draft)
        packed_labels(draft, packing := self.packings.get(component.name))
        if packing is not None:
            annotations[PACKING_ANNOTATION] = packing.annotation
        labels = labels_of(deployment, component)
        draft.warnings += [
            Problem((*draft.at, "metadata", "labels", key), f"{OWN_LABEL}, and is {value}: remove it here")
            for key, value in labels.items()
            if draft.labels.get(key, value) != value
        ]
        draft.labels = {**deployment.spec.labels, **draft.labels, **labels}
        self.drafts.append((component, draft, annotations))
        return problems

    def _add_policy(self, draft: PodDraft, component: ComponentSpec) -> Manifest:
        """Add the transfer policy to a template; return the annotations for its Deployment."""
        policy, resolution = self.policy, self.resolution
        if policy is None or resolution is None:
            return {}
        if component.type is not ComponentType.FRONTEND:
            add_worker_policy(draft, component.type, policy, resolution.level_labels, self.defaults)
            return {LEVELS_ANNOTATION: _levels(resolution.level_labels)}
        if self.place is not None:
            place_frontend(draft, self.place, resolution.level_labels, self.defaults)
        self.assumes |= add_frontend_policy(draft, policy, self.links)
        return {} if self.of_topology is None else {QOS_ANNOTATION: qos_text(self.of_topology)}


def read_levels(annotation: str | None) -> tuple[Level, ...]:
    """Return the levels of :data:`LEVELS_ANNOTATION`, broadest first; invalid entries are skipped."""
    pairs = [entry.partition("=") for entry in (annotation or "").split(",")]
    return tuple(Level(domain, key) for domain, _, key in pairs if key and level_problem(domain) is None)


def _of_component(
    deployment: DynamoGraphDeployment,
    component: ComponentSpec,
    draft: PodDraft,
    annotations: Manifest,
    policy: DeploymentPolicy | None,
) -> Iterator[Manifest]:
    """Yield the objects of one component from its completed pod template."""
    yield workload(deployment, component, draft.template(), annotations)
    if component.type is ComponentType.FRONTEND:
        yield service(deployment, component, http_port(draft.main))
    is_counted_whole = policy is None or component.type is ComponentType.FRONTEND
    if is_counted_whole and has_budgets(deployment):
        yield component_budget(deployment, component)


def _left_out(
    settings: FrontendSettings, policy: DeploymentPolicy, resolution: Resolution
) -> Iterator[Problem]:
    for problem in level_problems(settings, policy, resolution):
        yield Problem(problem.path, f"{problem.must}: the link is left out")


def _upgrade_problems(deployment: DynamoGraphDeployment, resolution: Resolution | None) -> Iterator[Problem]:
    """Yield the problem with ``spec.upgrade``, if its level is none of those that pods know."""
    upgrade = deployment.spec.upgrade
    if upgrade is None:
        return
    if resolution is None:
        must = "needs a policy of KV transfers: without one, pods do not know their place"
        yield Problem(("spec", "upgrade"), must)
    elif resolution.source.is_found and label_of(resolution, upgrade.by) is None:
        known = ", ".join(level.domain for level in resolution.level_labels)
        yield Problem(("spec", "upgrade", "by"), f"{upgrade.by!r} is no level of the policy: {known}")


def _levels(level_labels: Sequence[LevelLabels]) -> str:
    return ",".join(f"{level.domain}={level.node_label}" for level in level_labels)
