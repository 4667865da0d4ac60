"""Checks that a replay can run a fleet file: one model, mock engines, known domains."""

from collections.abc import Iterator

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.settings.problems import Problem, dotted


def check_fleet(file: FleetFile) -> None:
    """Raise ConfigError, with the field, if a replay cannot run it."""
    if len(file.models) > 1:
        names = ", ".join(model.mock_name for model in file.models)
        raise ConfigError(f"models: a replay has one model, not {names}", param="models")
    for position, group in enumerate(file.workers):
        for problem in group_problems(group):
            field = dotted(("workers", position, *problem.path))
            raise ConfigError(f"{field}: {problem.must}", param=field)


def group_problems(group: WorkerGroup) -> Iterator[Problem]:
    """Yield the problems of a group for a replay; paths are those of its own fields."""
    if group.engine.kind != "mock":
        yield Problem(
            ("engine", "kind"),
            f"a replay runs mock engines, not {group.engine.kind}; give the sizes and the timing of such an "
            "engine to a mock one",
        )
    if group.topology_env:
        yield Problem(("topology_env",), "a replay reads no files of nodes; say domains instead")
