"""What a deployment may be called, and its components."""

import re

from kvrouter.config.problems import Path, Problem
from kvrouter.operator.api import DynamoGraphDeployment
from kvrouter.operator.api.names import SERVICE_CHARS_MAX, SERVICE_PATTERN


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
