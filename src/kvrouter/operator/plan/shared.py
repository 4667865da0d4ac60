"""Labels, annotations, variables and the priority class that a deployment gives all of its components."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvrouter.operator.api.deployment import (
    OPERATORS_PREFIX,
    RESERVED_LABELS,
    RESERVED_LABELS_PREFIXES,
    DeploymentSpec,
    EnvVariable,
)
from kvrouter.operator.api.names import LABEL_VALUE_CHARS_MAX, LABEL_VALUE_PATTERN, label_key_problem
from kvrouter.operator.plan.manifest import Manifest, listed, mapping, objects
from kvrouter.operator.plan.pod_template import PodDraft
from kvrouter.settings.problems import Path, Problem
from kvrouter.settings.variables import spellings


class SharedEnv(NamedTuple):
    """The variables for all containers, and a warning for each entry of ``spec.env`` without effect."""

    entries: tuple[Manifest, ...] = ()
    warnings: tuple[Problem, ...] = ()


OWN_LABEL = "is the operator's own label, by which objects and pods are found"


def shared_problems(spec: DeploymentSpec, labels_of_nodes: Collection[str] = ()) -> list[Problem]:
    """Return the problems with the labels, annotations and variables of all components.

    ``labels_of_nodes`` are the keys under which pods get labels of their nodes.
    """
    problems = []
    for key, value in spec.labels.items():
        at: Path = ("spec", "labels", key)
        must = label_key_problem(key)
        if must is None and (key in RESERVED_LABELS or key.startswith(RESERVED_LABELS_PREFIXES)):
            must = f"{OWN_LABEL}: choose another key"
        if must is None and key in labels_of_nodes:
            must = "is the node's to say, by the policy of KV transfers: remove it here"
        if must is None and not _is_label_value(value):
            must = f"must have at most {LABEL_VALUE_CHARS_MAX} letters, digits, '-', '_' and '.'"
        problems += [] if must is None else [Problem(at, must)]
    problems += annotation_problems(spec.annotations, ("spec", "annotations"))
    names = [entry.name for entry in spec.env]
    for index, entry in enumerate(spec.env):
        if entry.name in names[:index]:
            problems.append(Problem(("spec", "env", index, "name"), f"{entry.name!r} is there twice"))
        if entry.value and entry.value_from is not None:
            problems.append(Problem(("spec", "env", index), "has both value and valueFrom: remove one"))
    return problems


def annotation_problems(annotations: Iterable[str], at: Path) -> list[Problem]:
    """Return the problems with the keys of annotations at the path ``at``."""
    problems = []
    for key in annotations:
        must = label_key_problem(key)
        if must is None and key.startswith(OPERATORS_PREFIX):
            must = "is the operator's own annotation: choose another key"
        problems += [] if must is None else [Problem((*at, key), must)]
    return problems


def read_env(spec: DeploymentSpec, owned: Collection[str]) -> SharedEnv:
    """Return the variables for all containers, without the ``owned`` ones, which the policy sets."""
    taken = {spelling for name in owned for spelling in spellings(name)}
    must = "follows from the policy of KV transfers, and has no effect here: remove it"
    return SharedEnv(
        tuple(_variable(entry) for entry in spec.env if entry.name not in taken),
        tuple(
            Problem(("spec", "env", index), f"{entry.name} {must}")
            for index, entry in enumerate(spec.env)
            if entry.name in taken
        ),
    )


def give_shared(draft: PodDraft, spec: DeploymentSpec, env: SharedEnv) -> None:
    """Add the priority class and annotations that a pod does not state itself, and put the shared variables
    before its own, which may refer to them: ``$(NAME)``.
    """
    if spec.priority_class_name is not None and draft.spec.get("priority") is None:
        draft.spec.setdefault("priorityClassName", spec.priority_class_name)
    if spec.annotations:
        own = mapping(draft.metadata.get("annotations"))
        draft.metadata["annotations"] = {**spec.annotations, **own}
    draft.containers = [_sorted(container, env.entries) for container in draft.containers]
    draft.init_containers = [_sorted(container, env.entries) for container in draft.init_containers]


def _sorted(container: Manifest, entries: Sequence[Manifest]) -> Manifest:
    own = objects(container.get("env"))
    first = [entry for entry in entries if entry in own]
    return {**container, "env": listed([*first, *(e for e in own if e not in first)])} if first else container


def _variable(entry: EnvVariable) -> Manifest:
    found: Manifest = {"name": entry.name}
    if entry.value_from is not None:
        found["valueFrom"] = {**entry.value_from}
    elif entry.value is not None:
        found["value"] = entry.value
    return found


def _is_label_value(value: str) -> bool:
    is_short = len(value) <= LABEL_VALUE_CHARS_MAX
    return not value or (is_short and re.fullmatch(LABEL_VALUE_PATTERN, value) is not None)
