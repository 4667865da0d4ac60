"""Whether a deployment may be created or changed: every reason why not, and what is odd but may be."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvrouter.config.problems import Path, Problem
from kvrouter.operator.admission.placed import topology_problems
from kvrouter.operator.admission.stays import changed_what_stays
from kvrouter.operator.admission.told import warnings_of
from kvrouter.operator.admission.written import name_problems
from kvrouter.operator.api import DynamoGraphDeployment, Reading, read_deployment
from kvrouter.operator.facts import ClusterFacts
from kvrouter.operator.plan import COMPONENT_LABEL, Manifest, Plan, PlanDefaults, plan
from kvrouter.operator.plan.manifest import mapping
from kvrouter.operator.policy import read_policy


class Verdict(NamedTuple):
    """Allowed when there are no problems; warnings are told either way."""

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
    stays = () if before is None else changed_what_stays(deployment.spec, before.spec)
    return Verdict((*fresh, *stays), (*kept, *warnings(reading, planned, facts, known=kept)))


def warnings(
    reading: Reading, planned: Plan, facts: ClusterFacts, *, known: Sequence[Problem] = ()
) -> tuple[Problem, ...]:
    """Return what a user wrote that is odd, or that nobody gets; of a place that is ``known``, or told by the
    deployment as a whole, no more than that.
    """
    of_spec = () if reading.deployment is None else warnings_of(reading.deployment.spec, facts)
    told = [*reading.unknown, *of_spec]
    places = {warning.path for warning in (*known, *told)}
    return (*told, *(warning for warning in planned.warnings if warning.path not in places))


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
    labels = mapping(mapping(manifest.get("metadata")).get("labels"))
    component = labels.get(COMPONENT_LABEL)
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
    """What was wrong before, and is not made anew by the change."""
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
    return problems
