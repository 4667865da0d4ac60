"""Validates a deployment: errors, warnings, immutable fields, names, and the topology it refers to."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvrouter.kube.objects import labels_of
from kvrouter.operator.api.deployment import (
    TOPOLOGY_IS_IMMUTABLE,
    TYPE_IS_IMMUTABLE,
    ComponentType,
    DeploymentReading,
    DeploymentSpec,
    DynamoGraphDeployment,
    read_deployment,
)
from kvrouter.operator.api.grove import ClusterTopology
from kvrouter.operator.api.names import SERVICE_CHARS_MAX, SERVICE_PATTERN
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.labels.level_labels import resolve
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.frontend_links import level_problems
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, Manifest
from kvrouter.operator.plan.plan import Plan, plan
from kvrouter.operator.plan.transfer_policy import prefill_problem
from kvrouter.operator.policy import (
    GRAPH_POLICY,
    TOPOLOGY_NAME,
    Declared,
    NamedTopology,
    RawLabel,
    read_policy,
)
from kvrouter.settings.problems import Path, Problem, did_you_mean

LISTED_MAX = 10


def topology_problems(declared: Declared, cluster_info: ClusterInfo) -> list[Problem]:
    """Return the problems with a policy's topology in this cluster; empty if its source is a raw label."""
    source = declared.policy.source
    if not isinstance(source, NamedTopology):
        return []
    topology = cluster_info.topologies.get(source.name)
    if cluster_info.grove is Grove.ABSENT:
        must = (
            f"{source.name!r} cannot be read: this cluster knows no ClusterTopologyBinding and no "
            "ClusterTopology (grove.io). Install Grove"
        )
    elif cluster_info.grove is Grove.UNREAD:
        because = f" ({cluster_info.unread_because})" if cluster_info.unread_because else ""
        must = f"{source.name!r} could not be read just now{because}: try again"
    elif topology is None:
        names = sorted(cluster_info.topologies)
        there = f"there are {listed(names)}{did_you_mean(source.name, names)}" if names else "there is none"
        must = (
            f"no ClusterTopologyBinding or ClusterTopology {source.name!r} is in this cluster; {there}. "
            "Name one that is there, create it"
        )
    else:
        return _level_problems(declared, topology)
    return [Problem(declared.source_at, f"{must}, or {_without_grove(declared)}")]


def _level_problems(declared: Declared, topology: ClusterTopology) -> list[Problem]:
    domain = declared.policy.domain
    if domain in topology.domains:
        return []
    levels = f"has {listed(topology.domains)}" if topology.domains else "has none that can be used"
    odd = f" ({'; '.join(topology.oddities)})" if topology.oddities else ""
    return [
        Problem(
            declared.domain_at,
            f"{domain!r} is no level of {topology.kind} {topology.name}, which {levels}"
            f"{did_you_mean(domain, topology.domains)}{odd}",
        )
    ]


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return the first names, and the number of further names."""
    more = len(names) - LISTED_MAX
    return ", ".join(names[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _without_grove(declared: Declared) -> str:
    """Return how the same policy is written without a topology."""
    if declared.at == GRAPH_POLICY:
        return "replace clusterTopologyName by labelKey, the key of a node label, which needs no Grove"
    return "set kvCacheTransferTopology.label to the key of a node label, which needs no Grove"


def changed_immutable_fields(new: DeploymentSpec, old: DeploymentSpec) -> tuple[Problem, ...]:
    """Return a problem for each component with another type, and for another topology or none."""
    problems = []
    types = {component.name: component.type for component in old.components}
    for index, component in enumerate(new.components):
        was = types.get(component.name, component.type)
        if was is not component.type:
            problems.append(
                Problem(
                    ("spec", "components", index, "type"),
                    f"of {component.name} {TYPE_IS_IMMUTABLE} (it is {was}, not {component.type})",
                )
            )
    if old.topology_constraint is not None:
        was_name = old.topology_constraint.cluster_topology_name
        name = None if new.topology_constraint is None else new.topology_constraint.cluster_topology_name
        if name != was_name:
            problems.append(
                Problem(TOPOLOGY_NAME, f"{TOPOLOGY_IS_IMMUTABLE} (it is {was_name!r}, not {name!r})")
            )
    return tuple(problems)


COMPONENTS: Path = ("spec", "components")
RECOMMENDED_LABELS = "app.kubernetes.io/"


def warnings_of(spec: DeploymentSpec, cluster_info: ClusterInfo) -> list[Problem]:
    """Return the warnings on ``spec``; they do not depend on the spec that it replaces."""
    declared = read_policy(spec).declared
    if declared is None:
        return []
    return [*_balance(spec, declared), *_source(spec, declared, cluster_info)]


def _balance(spec: DeploymentSpec, declared: Declared) -> Iterator[Problem]:
    types = {component.type for component in spec.components}
    if ComponentType.FRONTEND not in types:
        yield Problem(declared.at, "is kept by frontends, and no component is of type frontend: add one")
    if ComponentType.PREFILL not in types:
        yield Problem(
            declared.at,
            "has no effect: no component is of type prefill, so no KV goes from one worker to another",
        )
    elif not types & {ComponentType.DECODE, ComponentType.WORKER}:
        yield Problem(COMPONENTS, "has prefill workers, and none that decode: every request would be refused")
    if declared.policy.preferred_weight == 0:
        yield Problem(declared.at, "prefers nothing: preferredWeight is 0")


def _source(spec: DeploymentSpec, declared: Declared, cluster_info: ClusterInfo) -> Iterator[Problem]:
    source = declared.policy.source
    if isinstance(source, RawLabel) and source.key.startswith(RECOMMENDED_LABELS):
        yield Problem(
            declared.source_at,
            f"is {source.key!r}, by which people and tools find pods, and pods get their node's value of it: "
            "name a label that says where a node is, such as topology.kubernetes.io/zone",
        )
    if not isinstance(source, NamedTopology):
        return
    constraint = spec.topology_constraint
    if (
        declared.at == GRAPH_POLICY
        and constraint is not None
        and constraint.cluster_topology_name != source.name
    ):
        yield Problem(
            declared.source_at,
            f"is {source.name!r}, but pods are placed by {constraint.cluster_topology_name!r} "
            "(spec.topologyConstraint)",
        )
    topology = cluster_info.topologies.get(source.name)
    if topology is not None and topology.oddities:
        yield Problem(declared.source_at, f"not all of it can be used: {'; '.join(topology.oddities)}")


def name_problems(deployment: DynamoGraphDeployment) -> list[Problem]:
    """Return the problems with names: ``<deployment>-<component>`` has to be a unique name of a Service."""
    problems = []
    name = deployment.metadata.name
    if name and re.fullmatch(SERVICE_PATTERN, name) is None:
        problems.append(
            Problem(
                ("metadata", "name"),
                f"becomes the name of Services, so it must be of lower-case letters, digits and '-', first a "
                f"letter, not {name!r}",
            )
        )
    first_index: dict[str, int] = {}
    for index, component in enumerate(deployment.spec.components):
        at: Path = ("spec", "components", index, "name")
        first = first_index.setdefault(component.name.lower(), index)
        if first != index:
            problems.append(
                Problem(
                    at, f"{component.name!r} is the name of spec.components[{first}] too, but for its case"
                )
            )
        chars = len(name) + 1 + len(component.name)
        if chars > SERVICE_CHARS_MAX:
            problems.append(
                Problem(
                    at,
                    f"{name}-{component.name.lower()} would be a Service's name of {chars} characters: "
                    f"{SERVICE_CHARS_MAX} are allowed, so shorten this name or metadata.name",
                )
            )
        if component.topology_constraint is not None and deployment.spec.topology_constraint is None:
            problems.append(
                Problem(
                    ("spec", "components", index, "topologyConstraint"),
                    "needs a topology whose levels it can name: set "
                    "spec.topologyConstraint.clusterTopologyName",
                )
            )
    return problems


class Verdict(NamedTuple):
    """A verdict: allowed without problems; warnings are reported either way."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def is_allowed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def validate(new: object, old: object | None, cluster_info: ClusterInfo, defaults: PlanDefaults) -> Verdict:
    """Return the verdict on ``new``, any JSON value; ``old`` is the deployment that it replaces, None at
    creation.

    Never raises. A problem that ``old`` has too is a warning, but not for a changed policy: a deleted
    topology must not stop a fleet from being scaled. Deployments that are being deleted are allowed.
    """
    if _is_leaving(new):
        return Verdict()
    reading = read_deployment(new)
    deployment = reading.deployment
    if deployment is None:
        return Verdict(reading.problems)
    before = None if old is None else read_deployment(old).deployment
    planned = plan(deployment, cluster_info, defaults)
    problems = [*_written(deployment, planned), *_of_policy(deployment, cluster_info)]
    known = frozenset(() if before is None else _left_as_it_was(before, deployment, cluster_info, defaults))
    kept = [problem for problem in problems if _named(problem, deployment) in known]
    fresh = [problem for problem in problems if _named(problem, deployment) not in known]
    stays = () if before is None else changed_immutable_fields(deployment.spec, before.spec)
    renamed = () if before is None else _renamed(deployment.spec, before.spec, defaults)
    further = warnings(reading, planned, cluster_info, known=problems)
    return Verdict((*fresh, *stays), (*kept, *renamed, *further))


def _renamed(spec: DeploymentSpec, before: DeploymentSpec, defaults: PlanDefaults) -> Iterator[Problem]:
    """Yield a warning for each new component if one of its role is removed: what happens to the pods."""
    names, had = ({each.name for each in of.components} for of in (spec, before))
    for index, component in enumerate(spec.components):
        gone = [
            each.name for each in before.components if each.type is component.type and each.name not in names
        ]
        if component.name not in had and gone:
            yield Problem(
                (*COMPONENTS, index, "name"),
                f"is new, and {', '.join(gone)} is gone: another name is another component. Pods of the old "
                f"one end once those of {component.name} are Ready, or after {defaults.disruption_hold_s} s; "
                "until then both need room",
            )


def warnings(
    reading: DeploymentReading, planned: Plan, cluster_info: ClusterInfo, *, known: Sequence[Problem] = ()
) -> tuple[Problem, ...]:
    """Return warnings about user-written fields that are odd or have no effect. A path in ``known``, or with
    a warning about the deployment as a whole, gets no further warning.
    """
    of_spec = () if reading.deployment is None else warnings_of(reading.deployment.spec, cluster_info)
    found = [*reading.unknown, *of_spec]
    places = {warning.path for warning in (*known, *found)}
    return (*found, *(warning for warning in planned.warnings if warning.path not in places))


def changed_manifests(
    new: object, old: object | None, cluster_info: ClusterInfo, defaults: PlanDefaults
) -> list[tuple[Path, Manifest]]:
    """Return the manifests that the operator writes because ``new`` takes the place of ``old``, each with its
    component's path. Manifests that ``old`` has too are left out.
    """
    deployment = None if _is_leaving(new) else read_deployment(new).deployment
    if deployment is None or not deployment.metadata.name:
        return []
    before = None if old is None else read_deployment(old).deployment
    known = () if before is None else plan(before, cluster_info, defaults).manifests
    indexes = {component.name: index for index, component in enumerate(deployment.spec.components)}
    return [
        (_place_of(manifest, indexes), manifest)
        for manifest in plan(deployment, cluster_info, defaults).manifests
        if manifest not in known
    ]


def _place_of(manifest: Manifest, indexes: Mapping[str, int]) -> Path:
    component = labels_of(manifest).get(COMPONENT_LABEL)
    return ("spec", "components", indexes[component]) if isinstance(component, str) else ()


def _is_leaving(new: object) -> bool:
    metadata = new.get("metadata") if isinstance(new, dict) else None
    return isinstance(metadata, Mapping) and bool(metadata.get("deletionTimestamp"))


def _left_as_it_was(
    before: DynamoGraphDeployment,
    deployment: DynamoGraphDeployment,
    cluster_info: ClusterInfo,
    defaults: PlanDefaults,
) -> list[Problem]:
    """Return the problems of ``before`` that the change does not make again."""
    problems = _written(before, plan(before, cluster_info, defaults))
    if read_policy(before.spec) == read_policy(deployment.spec):
        problems += _of_policy(before, cluster_info)
    return [_named(problem, before) for problem in problems]


def _named(problem: Problem, deployment: DynamoGraphDeployment) -> Problem:
    """Return ``problem`` with its component's name in place of its index, which other components change."""
    match problem.path:
        case ("spec", "components", int() as index, *rest):
            name = deployment.spec.components[index].name
            return Problem(("spec", "components", name, *rest), problem.must)
    return problem


def _written(deployment: DynamoGraphDeployment, planned: Plan) -> list[Problem]:
    """Return the problems with names and with pods, without those of the policy."""
    of_policy = read_policy(deployment.spec).problems
    of_pods = [problem for problem in planned.problems if problem not in of_policy]
    return [*name_problems(deployment), *of_pods]


def _of_policy(deployment: DynamoGraphDeployment, cluster_info: ClusterInfo) -> list[Problem]:
    policy = read_policy(deployment.spec)
    problems = [*policy.problems]
    if policy.declared is not None:
        problems += topology_problems(policy.declared, cluster_info)
        of = policy.declared.policy
        resolution = resolve(of, cluster_info)
        problems += level_problems(policy.settings, of, resolution)
        prefill = prefill_problem(policy.settings, of, resolution)
        problems += [] if prefill is None else [prefill]
    return problems
