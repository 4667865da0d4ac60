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
from kvrouter.operator.cluster_info import ClusterFacts, Grove
from kvrouter.operator.labels.copies import resolve
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.links import level_problems
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, Manifest
from kvrouter.operator.plan.plan import Plan, plan
from kvrouter.operator.plan.wiring import prefill_problem
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


def topology_problems(declared: Declared, facts: ClusterFacts) -> list[Problem]:
    """Return what is wrong with a policy in this cluster; nothing when its source is a raw label."""
    source = declared.policy.source
    if not isinstance(source, NamedTopology):
        return []
    topology = facts.topologies.get(source.name)
    if facts.grove is Grove.ABSENT:
        must = (
            f"{source.name!r} cannot be read: this cluster knows no ClusterTopologyBinding and no "
            "ClusterTopology (grove.io). Install Grove"
        )
    elif facts.grove is Grove.UNREAD:
        because = f" ({facts.unread_because})" if facts.unread_because else ""
        must = f"{source.name!r} could not be read just now{because}: try again"
    elif topology is None:
        names = sorted(facts.topologies)
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
    """Return the first names, and how many more there are."""
    more = len(names) - LISTED_MAX
    return ", ".join(names[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _without_grove(declared: Declared) -> str:
    """How the same policy is written without a topology."""
    if declared.at == GRAPH_POLICY:
        return "replace clusterTopologyName by labelKey, the key of a node label, which needs no Grove"
    return "set kvCacheTransferTopology.label to the key of a node label, which needs no Grove"


def changed_immutable_fields(new: DeploymentSpec, old: DeploymentSpec) -> tuple[Problem, ...]:
    """Return a problem for each component of another type, and for another topology or none."""
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


def warnings_of(spec: DeploymentSpec, facts: ClusterFacts) -> list[Problem]:
    """Return the warnings on ``spec``: they never depend on what it was before."""
    declared = read_policy(spec).declared
    if declared is None:
        return []
    return [*_balance(spec, declared), *_source(spec, declared, facts)]


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


def _source(spec: DeploymentSpec, declared: Declared, facts: ClusterFacts) -> Iterator[Problem]:
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
    topology = facts.topologies.get(source.name)
    if topology is not None and topology.oddities:
        yield Problem(declared.source_at, f"not all of it can be used: {'; '.join(topology.oddities)}")


def name_problems(deployment: DynamoGraphDeployment) -> list[Problem]:
    """Names become Services, ``<deployment>-<component>``: one each, and no longer than a Service's."""
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
    seen: dict[str, int] = {}
    for index, component in enumerate(deployment.spec.components):
        at: Path = ("spec", "components", index, "name")
        first = seen.setdefault(component.name.lower(), index)
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
    """Allowed when there are no problems; warnings are reported either way."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def is_allowed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def validate(new: object, old: object | None, facts: ClusterFacts, defaults: PlanDefaults) -> Verdict:
    """Return the verdict on ``new``, any JSON value; ``old`` is what it replaces, None at its creation.

    Never raises. What is wrong in ``new`` and was wrong in ``old`` in the same way is a warning, but for the
    policy when that changes: a topology that somebody deleted must not stop a fleet from being scaled. What
    is being deleted is left alone.
    """
    if _is_leaving(new):
        return Verdict()
    reading = read_deployment(new)
    deployment = reading.deployment
    if deployment is None:
        return Verdict(reading.problems)
    before = None if old is None else read_deployment(old).deployment
    planned = plan(deployment, facts, defaults)
    problems = [*_written(deployment, planned), *_of_policy(deployment, facts)]
    known = frozenset(() if before is None else _left_as_it_was(before, deployment, facts, defaults))
    kept = [problem for problem in problems if _named(problem, deployment) in known]
    fresh = [problem for problem in problems if _named(problem, deployment) not in known]
    stays = () if before is None else changed_immutable_fields(deployment.spec, before.spec)
    renamed = () if before is None else _renamed(deployment.spec, before.spec, defaults)
    return Verdict((*fresh, *stays), (*kept, *renamed, *warnings(reading, planned, facts, known=problems)))


def _renamed(spec: DeploymentSpec, before: DeploymentSpec, defaults: PlanDefaults) -> Iterator[Problem]:
    """What becomes of the pods of a component that is gone while one of its role is new."""
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
    reading: DeploymentReading, planned: Plan, facts: ClusterFacts, *, known: Sequence[Problem] = ()
) -> tuple[Problem, ...]:
    """Return what a user wrote that is odd, or that nobody gets; of a place that is ``known``, or reported
    by the deployment as a whole, no more than that.
    """
    of_spec = () if reading.deployment is None else warnings_of(reading.deployment.spec, facts)
    found = [*reading.unknown, *of_spec]
    places = {warning.path for warning in (*known, *found)}
    return (*found, *(warning for warning in planned.warnings if warning.path not in places))


def changed_manifests(
    new: object, old: object | None, facts: ClusterFacts, defaults: PlanDefaults
) -> list[tuple[Path, Manifest]]:
    """Return the manifests that the operator writes because ``new`` takes the place of ``old``, each with the
    place of its component in the spec. What ``old`` makes it write just so is none of them: it is there.
    """
    deployment = None if _is_leaving(new) else read_deployment(new).deployment
    if deployment is None or not deployment.metadata.name:
        return []
    before = None if old is None else read_deployment(old).deployment
    known = () if before is None else plan(before, facts, defaults).manifests
    indexes = {component.name: index for index, component in enumerate(deployment.spec.components)}
    return [
        (_place_of(manifest, indexes), manifest)
        for manifest in plan(deployment, facts, defaults).manifests
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
    facts: ClusterFacts,
    defaults: PlanDefaults,
) -> list[Problem]:
    """What was wrong before, and is not made again by the change."""
    problems = _written(before, plan(before, facts, defaults))
    if read_policy(before.spec) == read_policy(deployment.spec):
        problems += _of_policy(before, facts)
    return [_named(problem, before) for problem in problems]


def _named(problem: Problem, deployment: DynamoGraphDeployment) -> Problem:
    """``problem`` with its component's name in place of its number, which changes when others come or go."""
    match problem.path:
        case ("spec", "components", int() as index, *rest):
            name = deployment.spec.components[index].name
            return Problem(("spec", "components", name, *rest), problem.must)
    return problem


def _written(deployment: DynamoGraphDeployment, planned: Plan) -> list[Problem]:
    """What is wrong with names, and with what pods are to be made of; the policy apart."""
    of_policy = read_policy(deployment.spec).problems
    of_pods = [problem for problem in planned.problems if problem not in of_policy]
    return [*name_problems(deployment), *of_pods]


def _of_policy(deployment: DynamoGraphDeployment, facts: ClusterFacts) -> list[Problem]:
    policy = read_policy(deployment.spec)
    problems = [*policy.problems]
    if policy.declared is not None:
        problems += topology_problems(policy.declared, facts)
        of = policy.declared.policy
        resolution = resolve(of, facts)
        problems += level_problems(policy.settings, of, resolution)
        prefill = prefill_problem(policy.settings, of, resolution)
        problems += [] if prefill is None else [prefill]
    return problems
