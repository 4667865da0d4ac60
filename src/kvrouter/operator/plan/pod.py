"""A component's pod template as the user wrote it, taken apart to be completed and put together again."""

from dataclasses import dataclass, field

from kvrouter.config.problems import Path, Problem
from kvrouter.operator.api import Component
from kvrouter.operator.plan.manifest import Manifest, listed, mapping, objects, without_nothing

_LISTS = ("containers", "initContainers", "volumes")
_READ_FIRST = ("name", "image", "command", "args", "env", "ports")


@dataclass(slots=True)
class PodDraft:
    """The template in parts. ``at`` is where it stands; ``warnings`` are about what the user wrote there."""

    at: Path
    metadata: Manifest
    labels: Manifest
    spec: Manifest
    containers: list[Manifest]
    init_containers: list[Manifest]
    volumes: list[Manifest]
    warnings: list[Problem] = field(default_factory=list)

    @property
    def main(self) -> Manifest:
        """The container that serves: the one called main, else the first."""
        return self.containers[self.main_index]

    @property
    def main_index(self) -> int:
        """Where it is among the containers."""
        names = [container.get("name") for container in self.containers]
        return names.index("main") if "main" in names else 0

    def template(self) -> Manifest:
        """Return the template, with what is empty left out."""
        lists: Manifest = {
            "initContainers": listed([_in_order(container) for container in self.init_containers]),
            "containers": listed([_in_order(container) for container in self.containers]),
            "volumes": listed(self.volumes),
        }
        metadata: Manifest = {**self.metadata, "labels": self.labels}
        return {"metadata": without_nothing(metadata), "spec": {**self.spec, **without_nothing(lists)}}


def read_pod_template(component: Component, at: Path) -> PodDraft | list[Problem]:
    """Return the parts of a component's template; problems where something in it has the wrong form."""
    template, at = {**component.pod_template}, (*at, "podTemplate")
    problems = [
        Problem((*at, name), "must be an object")
        for name in ("metadata", "spec")
        if not isinstance(template.get(name, {}), dict)
    ]
    metadata, spec = mapping(template.get("metadata")), mapping(template.get("spec"))
    labels = metadata.pop("labels", {})
    if not isinstance(labels, dict):
        problems.append(Problem((*at, "metadata", "labels"), "must be an object"))
    lists = {name: spec.pop(name, []) for name in _LISTS}
    for name, found in lists.items():
        if not isinstance(found, list) or len(objects(found)) != len(found):
            problems.append(Problem((*at, "spec", name), "must be a list of objects"))
    for name in ("containers", "initContainers"):
        problems += _problems_inside(objects(lists[name]), (*at, "spec", name))
    if problems:
        return problems
    return PodDraft(
        at=at,
        metadata=metadata,
        labels=mapping(labels),
        spec=spec,
        containers=objects(lists["containers"]),
        init_containers=objects(lists["initContainers"]),
        volumes=objects(lists["volumes"]),
    )


def _in_order(container: Manifest) -> Manifest:
    """A container as people read it: what it is first, then all else."""
    first: Manifest = {key: container[key] for key in _READ_FIRST if key in container}
    return {**first, **{key: value for key, value in container.items() if key not in first}}


def _problems_inside(containers: list[Manifest], at: Path) -> list[Problem]:
    return [
        Problem((*at, index, name), "must be a list of objects")
        for index, container in enumerate(containers)
        for name in ("env", "volumeMounts", "ports")
        if len(objects(container.get(name))) != len(_entries(container.get(name, [])))
    ]


def _entries(found: object) -> list[object]:
    """The entries of a list; what is no list counts as one entry that is no object."""
    return found if isinstance(found, list) else [found]
