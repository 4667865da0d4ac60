"""A component's pod template as a draft: read from the user's, and rendered; names of its variables."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from kvrouter.operator.api.deployment import ComponentSpec
from kvrouter.operator.plan.manifest import Manifest, listed, mapping, objects, without_nothing
from kvrouter.settings.problems import Path, Problem
from kvrouter.settings.variables import spellings

_LISTS = ("containers", "initContainers", "volumes")
_READ_FIRST = ("name", "image", "command", "args", "env", "ports")


@dataclass(slots=True)
class PodDraft:
    """A pod template in parts. ``at`` is its path; ``warnings`` are about user-written fields."""

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
        """The position of the main container."""
        names = [container.get("name") for container in self.containers]
        return names.index("main") if "main" in names else 0

    def template(self) -> Manifest:
        """Return the template without its empty fields."""
        lists: Manifest = {
            "initContainers": listed([_in_order(container) for container in self.init_containers]),
            "containers": listed([_in_order(container) for container in self.containers]),
            "volumes": listed(self.volumes),
        }
        metadata: Manifest = {**self.metadata, "labels": self.labels}
        return {"metadata": without_nothing(metadata), "spec": {**self.spec, **without_nothing(lists)}}


def read_pod_template(component: ComponentSpec, at: Path) -> PodDraft | list[Problem]:
    """Return the parts of a component's template, or the problems with its form."""
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
    if not isinstance(metadata.get("annotations", {}), dict):
        problems.append(Problem((*at, "metadata", "annotations"), "must be an object"))
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
    """Return a container with its fields in reading order: name, image and command first."""
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
    """Return the entries of a list; any other value counts as one entry that is no object."""
    return found if isinstance(found, list) else [found]


TOPOLOGY_ENABLED = "DYN_TOPOLOGY_ENABLED"
TOPOLOGY_MOUNT_PATH = "DYN_TOPOLOGY_MOUNT_PATH"
TOPOLOGY_LEVELS = "DYN_TOPOLOGY_LEVELS"
TRANSFER_DOMAIN = "DYN_KV_TRANSFER_DOMAIN"
TRANSFER_ENFORCEMENT = "DYN_KV_TRANSFER_ENFORCEMENT"
TRANSFER_WEIGHT = "DYN_KV_TRANSFER_PREFERRED_WEIGHT"
ROUTER_LEVEL = "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL"
ROUTER_MISMATCH = "DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY"
ROUTER_MODE = "DYN_ROUTER_MODE"
ROUTER_LINKS = "KVROUTER_ROUTER_LINKS"
LINKS_WEIGHT = "KVROUTER_KV_TRANSFER_WEIGHT"
PREFILL_LEVEL = "KVROUTER_ROUTER_PREFILL_LEVEL"
PREFILL_ENFORCEMENT = "KVROUTER_ROUTER_PREFILL_ENFORCEMENT"
PREFILL_WEIGHT = "KVROUTER_ROUTER_PREFILL_WEIGHT"

OWNED_ON_WORKERS = frozenset(
    {
        TOPOLOGY_ENABLED,
        TOPOLOGY_MOUNT_PATH,
        TOPOLOGY_LEVELS,
        TRANSFER_DOMAIN,
        TRANSFER_ENFORCEMENT,
        TRANSFER_WEIGHT,
        ROUTER_LEVEL,
        ROUTER_MISMATCH,
    }
)
OWNED_ON_FRONTENDS = frozenset({ROUTER_MODE, ROUTER_LEVEL, ROUTER_MISMATCH})
VALUE_CHARS_REPORTED = 60


def variable(name: str, value: str) -> Manifest:
    """Return one entry of ``env``."""
    return {"name": name, "value": value}


def value_of(container: Manifest, name: str) -> str | None:
    """Return the value that ``container`` states for a variable; None if it states no value."""
    entry = entry_of(container, name)
    value = None if entry is None else entry.get("value")
    return value if isinstance(value, str) else None


def entry_of(container: Manifest, name: str) -> Manifest | None:
    """Return the entry of ``env`` that applies to a variable, under any of its names; None without one."""
    found = [entry for entry in objects(container.get("env")) if _is_one(entry.get("name"), name)]
    return found[-1] if found else None


def offered(container: Manifest, entries: Sequence[Manifest]) -> Manifest:
    """Return ``container`` with those of ``entries`` that it does not set itself, after its own."""
    own = objects(container.get("env"))
    added = [entry for entry in entries if entry_of(container, str(entry["name"])) is None]
    return {**container, "env": listed([*own, *added])} if added else container


def owned(
    container: Manifest, entries: Sequence[Manifest], names: Collection[str], at: Path
) -> tuple[Manifest, list[Problem]]:
    """Return ``container`` with ``entries`` as the only values of ``names``, and warnings about the removed
    ones.

    The operator's variables come first, so that a user's own may refer to them.
    """
    ours: dict[JsonValue, Manifest] = {entry["name"]: entry for entry in entries}
    taken: dict[JsonValue, str] = {spelling: name for name in names for spelling in spellings(name)}
    own = objects(container.get("env"))
    warnings = [
        Problem((*at, "env", index), _overwritten(str(entry.get("name")), ours.get(taken[entry.get("name")])))
        for index, entry in enumerate(own)
        if entry.get("name") in taken and entry != ours.get(entry.get("name"))
    ]
    kept = [entry for entry in own if entry.get("name") not in taken]
    return {**container, "env": listed([*entries, *kept])}, warnings


def overruled_sources(written: PodDraft, completed: PodDraft) -> Iterator[Problem]:
    """Yield a warning for each ``envFrom`` that may hold variables which the operator sets in ``env``, where
    they take precedence. The sources are not read: the operator has no right to read Secrets.
    """
    for name in ("containers", "initContainers"):
        is_init = name == "initContainers"
        made = completed.init_containers if is_init else completed.containers
        by_name = {str(container.get("name")): container for container in made}
        for index, container in enumerate(written.init_containers if is_init else written.containers):
            prefixes = [str(source.get("prefix") or "") for source in objects(container.get("envFrom"))]
            own = [entry.get("name") for entry in objects(container.get("env"))]
            set_here = objects(by_name.get(str(container.get("name")), {}).get("env"))
            added = [str(entry.get("name")) for entry in set_here if entry.get("name") not in own]
            held = [one for one in added if any(_may_hold(prefix, one) for prefix in prefixes)]
            if held:
                must = (
                    "is overruled, since env takes precedence over it, on what the operator sets: "
                    f"{', '.join(held)}. To set one of these, write it as env of this container"
                )
                yield Problem((*completed.at, "spec", name, index, "envFrom"), must)


def _may_hold(prefix: str, name: str) -> bool:
    return any(spelling.startswith(prefix) for spelling in spellings(name))


def _is_one(name: JsonValue, other: str) -> bool:
    """Whether two names are spellings of one variable."""
    return name == other or (isinstance(name, str) and (name in spellings(other) or other in spellings(name)))


def _overwritten(name: str, ours: Manifest | None) -> str:
    value = None if ours is None else str(ours["value"])
    if value is not None and len(value) > VALUE_CHARS_REPORTED:
        value = f"{value[:VALUE_CHARS_REPORTED]}…"
    becomes = "is left out" if value is None else f"becomes {value!r}"
    return f"{name} follows from the policy of KV transfers, and {becomes}: remove it here"
