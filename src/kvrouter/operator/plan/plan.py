"""The plan: every manifest of one deployment, in one order, from arguments alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvrouter.operator.api.deployment import ComponentSpec, ComponentType, DynamoGraphDeployment
from kvrouter.operator.api.grove import Level
from kvrouter.operator.api.names import level_problem
from kvrouter.operator.api.qos import NetworkQoS
from kvrouter.operator.cluster_info import ClusterFacts
from kvrouter.operator.labels.copies import Copy, Resolution, resolve
from kvrouter.operator.plan.account import accounts, give_account
from kvrouter.operator.plan.budgets import budget_warnings, component_budget, has_budgets
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.links import (
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
from kvrouter.operator.plan.pod import PodDraft, overruled_sources, read_pod_template
from kvrouter.operator.plan.programs import unregistered
from kvrouter.operator.plan.serving import complete, http_port
from kvrouter.operator.plan.shared import OWN_LABEL, SharedEnv, give_shared, read_env, shared_problems
from kvrouter.operator.plan.wiring import (
    FrontendPlace,
    frontend_place,
    names_of_policy,
    place_frontend,
    wire_frontend,
    wire_worker,
)
from kvrouter.operator.plan.workload import rollout_problems, service, workload
from kvrouter.operator.policy import DeploymentPolicy, FrontendSettings, read_policy
from kvrouter.settings.problems import Path, Problem

LEVELS_ANNOTATION = "kvrouter.dev/topology-levels"
"""Annotation of worker Deployments: the levels that they were planned with, ``domain=node label,…``."""

QOS_ANNOTATION = "kvrouter.dev/topology-network-qos"
"""Annotation of frontend Deployments: the links that their topology stated, as it would state them."""


class Plan(NamedTuple):
    """What the cluster should hold. With problems there are no manifests: nothing that is there is changed.

    ``warnings`` are about what a user wrote and does not get. Without a policy ``policy`` and ``resolution``
    are None. ``places_frontends``: their pods get the labels of their nodes, as workers' do.
    """

    manifests: tuple[Manifest, ...]
    warnings: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()
    policy: DeploymentPolicy | None = None
    resolution: Resolution | None = None
    places_frontends: bool = False


def plan(
    deployment: DynamoGraphDeployment,
    facts: ClusterFacts,
    defaults: PlanDefaults,
    *,
    last_levels: Sequence[Level] = (),
    last_qos: NetworkQoS | None = None,
    last_pack_levels: Sequence[Level] = (),
) -> Plan:
    """Return the manifests of ``deployment``: a Deployment for each component, a Service for each frontend, a
    budget for each component whose pods are not counted zone by zone, a NetworkPolicy for each where that is
    wanted, and before them the accounts of their processes.

    With a policy that cannot be determined nothing is planned: KV would go anywhere. ``last_levels`` are
    those of :data:`LEVELS_ANNOTATION` on what is there, ``last_qos`` the links of :data:`QOS_ANNOTATION` and
    ``last_pack_levels`` the levels of :data:`PACKING_ANNOTATION`. They hold while the topology cannot be
    found, so that nothing rolls because somebody deleted it.
    """
    reading = read_policy(deployment.spec)
    policy = reading.policy
    resolution = None if policy is None else resolve(policy, facts, last_levels)
    problems, manifests = [*reading.problems], accounts(deployment, defaults)
    packings, unpacked = read_packings(deployment.spec, facts, policy, last_pack_levels)
    warnings = [*budget_warnings(deployment), *unpacked]
    of_topology, links, place = None, FrontendLinks(), None
    if policy is not None and resolution is not None:
        warnings += _left_out(reading.settings, policy, resolution)
        of_topology = qos_of_topology(policy, resolution, facts, last_qos)
        links, found = frontend_links(reading.settings, of_topology, resolution)
        place, unplaced = frontend_place(reading.settings, policy, resolution)
        warnings += [*found, *unplaced]
    labels_of_nodes = () if resolution is None else [copy.pod_label for copy in resolution.copies]
    problems += shared_problems(deployment.spec, labels_of_nodes)
    env = read_env(deployment.spec, names_of_policy(policy, links, place))
    warnings += env.warnings
    drafting = _Drafting(deployment, defaults, policy, resolution, links, place, of_topology, env, packings)
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
    """The pod templates of a deployment's components, one after the other."""

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
    """Each component that can be read, its template, and the annotations of what is made of it."""
    assumes: bool = False
    """Whether a frontend weighs links that nobody named."""

    def add(self, component: ComponentSpec, at: Path) -> list[Problem]:
        """Draft the next component; return what is wrong with it."""
        deployment, defaults = self.deployment, self.defaults
        problems = [*rollout_problems(component, at)]
        draft = read_pod_template(component, at)
        if isinstance(draft, list):
            return problems + draft
        written = replace(draft, containers=[*draft.containers], init_containers=[*draft.init_containers])
        draft.warnings += unregistered(draft, component.type)
        problems += complete(draft, deployment, component, defaults, self.env.entries)
        give_account(draft, deployment, component.type, defaults)
        annotations = self._wire(draft, component)
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

    def _wire(self, draft: PodDraft, component: ComponentSpec) -> Manifest:
        """Give a template what the transfer policy asks of it; return its annotations."""
        policy, resolution = self.policy, self.resolution
        if policy is None or resolution is None:
            return {}
        if component.type is not ComponentType.FRONTEND:
            wire_worker(draft, component.type, policy, resolution.copies, self.defaults)
            return {LEVELS_ANNOTATION: _levels(resolution.copies)}
        if self.place is not None:
            place_frontend(draft, self.place, resolution.copies, self.defaults)
        self.assumes |= wire_frontend(draft, policy, self.links)
        return {} if self.of_topology is None else {QOS_ANNOTATION: qos_text(self.of_topology)}


def read_levels(annotation: str | None) -> tuple[Level, ...]:
    """Return the levels of :data:`LEVELS_ANNOTATION`, broadest first; what is no level is passed over."""
    pairs = [entry.partition("=") for entry in (annotation or "").split(",")]
    return tuple(Level(domain, key) for domain, _, key in pairs if key and level_problem(domain) is None)


def _of_component(
    deployment: DynamoGraphDeployment,
    component: ComponentSpec,
    draft: PodDraft,
    annotations: Manifest,
    policy: DeploymentPolicy | None,
) -> Iterator[Manifest]:
    """The objects of one component, whose pods are complete."""
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


def _levels(copies: Sequence[Copy]) -> str:
    return ",".join(f"{copy.domain}={copy.node_label}" for copy in copies)
