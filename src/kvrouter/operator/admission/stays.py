"""What of a deployment cannot change once it is there. Its policy can."""

from kvrouter.config.problems import Problem
from kvrouter.operator.api import DeploymentSpec
from kvrouter.operator.api.deployment import TOPOLOGY_STAYS, TYPE_STAYS
from kvrouter.operator.policy import TOPOLOGY_NAME


def changed_what_stays(new: DeploymentSpec, old: DeploymentSpec) -> tuple[Problem, ...]:
    """Return a problem for each component of another type, and for another topology or none."""
    problems = []
    types = {component.name: component.type for component in old.components}
    for index, component in enumerate(new.components):
        was = types.get(component.name, component.type)
        if was is not component.type:
            problems.append(
                Problem(
                    ("spec", "components", index, "type"),
                    f"of {component.name} {TYPE_STAYS} (it is {was}, not {component.type})",
                )
            )
    if old.topology_constraint is not None:
        was_name = old.topology_constraint.cluster_topology_name
        name = None if new.topology_constraint is None else new.topology_constraint.cluster_topology_name
        if name != was_name:
            problems.append(Problem(TOPOLOGY_NAME, f"{TOPOLOGY_STAYS} (it is {was_name!r}, not {name!r})"))
    return tuple(problems)
