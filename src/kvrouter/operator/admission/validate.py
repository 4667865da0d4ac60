"""Whether a deployment may be created or changed: every reason why not, and what is odd but may be."""

from collections.abc import Mapping
from typing import NamedTuple

from kvrouter.config.problems import Problem
from kvrouter.operator.admission.placed import topology_problems
from kvrouter.operator.admission.stays import changed_what_stays
from kvrouter.operator.admission.told import warnings_of
from kvrouter.operator.admission.written import name_problems
from kvrouter.operator.api import DynamoGraphDeployment, read_deployment
from kvrouter.operator.facts import ClusterFacts
from kvrouter.operator.policy import read_policy


class Verdict(NamedTuple):
    """Allowed when there are no problems; warnings are told either way."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def is_allowed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def validate(new: object, old: object | None, facts: ClusterFacts) -> Verdict:
    """Return the verdict on ``new``, any JSON value; ``old`` is what it replaces, None at its creation.

    Never raises. What is wrong in ``new`` and was wrong in ``old`` in the same way is a warning, unless the
    policy changes: a topology that somebody deleted must not stop a fleet from being scaled. What is being
    deleted is left alone.
    """
    if _is_leaving(new):
        return Verdict()
    reading = read_deployment(new)
    deployment = reading.deployment
    if deployment is None:
        return Verdict(reading.problems)
    before = None if old is None else read_deployment(old).deployment
    problems = _problems(deployment, facts)
    known = frozenset(() if before is None else _left_as_it_was(before, deployment, facts))
    kept = tuple(problem for problem in problems if problem in known)
    fresh = tuple(problem for problem in problems if problem not in known)
    stays = () if before is None else changed_what_stays(deployment.spec, before.spec)
    return Verdict((*fresh, *stays), (*kept, *reading.unknown, *warnings_of(deployment.spec, facts)))


def _is_leaving(new: object) -> bool:
    metadata = new.get("metadata") if isinstance(new, dict) else None
    return isinstance(metadata, Mapping) and bool(metadata.get("deletionTimestamp"))


def _left_as_it_was(
    before: DynamoGraphDeployment, deployment: DynamoGraphDeployment, facts: ClusterFacts
) -> list[Problem]:
    """What was wrong before, and is not made anew by the change."""
    if read_policy(before.spec) == read_policy(deployment.spec):
        return _problems(before, facts)
    return name_problems(before)


def _problems(deployment: DynamoGraphDeployment, facts: ClusterFacts) -> list[Problem]:
    """Everything that is wrong, whatever was there before."""
    policy = read_policy(deployment.spec)
    problems = [*name_problems(deployment), *policy.problems]
    if policy.declared is not None:
        problems += topology_problems(policy.declared, facts)
    return problems
