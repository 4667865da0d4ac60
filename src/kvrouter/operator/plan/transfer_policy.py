"""Adds the transfer policy to pods: topology files, the init container that waits for them, variables."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.core.constraints import NearEnforcement
from kvrouter.core.workers import Enforcement
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.operator.api.deployment import ComponentType, PrefillTopology
from kvrouter.operator.api.names import topology_label
from kvrouter.operator.labels.level_labels import LevelLabels, Resolution
from kvrouter.operator.plan import pod_template
from kvrouter.operator.plan.containers import flag_of, is_sidecar, restricted
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.frontend_links import FrontendLinks, unknown_level
from kvrouter.operator.plan.manifest import Manifest, listed, objects
from kvrouter.operator.plan.pod_template import (
    OWNED_ON_FRONTENDS,
    OWNED_ON_WORKERS,
    PodDraft,
    entry_of,
    owned,
    value_of,
    variable,
)
from kvrouter.operator.policy import DeploymentPolicy, FrontendSettings
from kvrouter.settings.problems import Path, Problem

VOLUME = "topology-labels"
WAIT = "topology-wait"
MOUNT_PATH = "/etc/dynamo/topology"
LINKS_FLAG = "--router-links"


def add_frontend_policy(draft: PodDraft, policy: DeploymentPolicy, links: FrontendLinks) -> bool:
    """Add the policy and the links with their weight to a frontend. Return whether it takes assumed links.

    The policy is for workers that publish none: a worker's own takes precedence. A router has no setting for
    ``preferred``; only the workers' own policies apply there.
    """
    entries = [variable(pod_template.ROUTER_MODE, "kv")]
    if policy.enforcement is not Enforcement.PREFERRED:
        fails = policy.enforcement is Enforcement.REQUIRED
        mismatch = MismatchPolicy.FAIL if fails else MismatchPolicy.FALLBACK
        entries.append(variable(pod_template.ROUTER_LEVEL, policy.domain))
        entries.append(variable(pod_template.ROUTER_MISMATCH, mismatch.value))
    if links.weight is not None:
        entries.append(variable(pod_template.LINKS_WEIGHT, str(links.weight)))
    assumes = False
    for index, container in enumerate(draft.containers):
        at = (*draft.at, "spec", "containers", index)
        frontend_entries = [*entries]
        if links.table is not None and not (links.is_assumed and _has_links(container)):
            frontend_entries.append(variable(pod_template.ROUTER_LINKS, links.table))
            assumes |= links.is_assumed
        # A user's own values stay for variables that the deployment and its topology do not set.
        names = OWNED_ON_FRONTENDS | {str(entry["name"]) for entry in frontend_entries}
        draft.containers[index], warnings = owned(container, frontend_entries, names, at)
        draft.warnings += warnings
    return assumes


def _has_links(container: Manifest) -> bool:
    """Whether a user states a frontend's links."""
    return (
        entry_of(container, pod_template.ROUTER_LINKS) is not None
        or flag_of(container, LINKS_FLAG) is not None
    )


class FrontendPlace(NamedTuple):
    """The topology settings of a frontend: the level in which prefill is near, and how strictly."""

    level: LevelLabels
    prefill: PrefillTopology


def names_of_policy(
    policy: DeploymentPolicy | None, links: FrontendLinks, place: FrontendPlace | None
) -> set[str]:
    """Return the variables that follow from the policy, on workers or frontends; a user's values of them have
    no effect. A container's own mount path stays.
    """
    if policy is None:
        return set()
    names = {*OWNED_ON_WORKERS, *OWNED_ON_FRONTENDS} - {pod_template.TOPOLOGY_MOUNT_PATH}
    if links.weight is not None:
        names.add(pod_template.LINKS_WEIGHT)
    if links.table is not None and not links.is_assumed:
        names.add(pod_template.ROUTER_LINKS)
    if place is not None:
        names |= {pod_template.PREFILL_LEVEL, pod_template.PREFILL_ENFORCEMENT}
        names |= set() if place.prefill.weight is None else {pod_template.PREFILL_WEIGHT}
    return names


def prefill_problem(
    settings: FrontendSettings, policy: DeploymentPolicy, resolution: Resolution
) -> Problem | None:
    """Return the problem with the level in which prefill is near; None if it is valid, or while the topology
    cannot be found.
    """
    if settings.prefill is None or not resolution.source.is_found:
        return None
    level, levels = settings.prefill.level, [level.domain for level in resolution.level_labels]
    if level in levels:
        return None
    return Problem((*settings.prefill_at, "level"), unknown_level(level, policy, levels))


def frontend_place(
    settings: FrontendSettings, policy: DeploymentPolicy, resolution: Resolution
) -> tuple[FrontendPlace | None, list[Problem]]:
    """Return the topology settings of frontends, None where prefill may be anywhere; and warnings.

    No worker is near at an unknown level: ``required`` fails closed, and frontends wait for the level;
    ``preferred`` has no effect.
    """
    prefill = settings.prefill
    if prefill is None:
        return None, []
    wrong = prefill_problem(settings, policy, resolution)
    if wrong is not None and prefill.enforcement is NearEnforcement.PREFERRED:
        return None, [Problem(wrong.path, f"{wrong.must}: prompts are prefilled anywhere")]
    label = topology_label(prefill.level)  # no node has a label under the pod's own key
    unknown = LevelLabels(prefill.level, label, label)
    level = next((level for level in resolution.level_labels if level.domain == prefill.level), unknown)
    warnings = [] if wrong is None else [Problem(wrong.path, f"{wrong.must}: new frontends wait for it")]
    return FrontendPlace(level, prefill), warnings


def place_frontend(
    draft: PodDraft, place: FrontendPlace, level_labels: Sequence[LevelLabels], defaults: PlanDefaults
) -> None:
    """Add a frontend's topology file, the init container that waits for it, and the variables of prefill.

    It gets this level alone, so that other levels of the topology may change without it.
    """
    resources = _take_back(draft, [*level_labels, place.level])
    prefill = place.prefill
    entries = [
        variable(pod_template.TOPOLOGY_ENABLED, "true"),
        variable(pod_template.TOPOLOGY_LEVELS, prefill.level),
        variable(pod_template.PREFILL_LEVEL, prefill.level),
        variable(pod_template.PREFILL_ENFORCEMENT, prefill.enforcement.value),
    ]
    if prefill.weight is not None:
        entries.append(variable(pod_template.PREFILL_WEIGHT, str(prefill.weight)))
    names = {pod_template.TOPOLOGY_MOUNT_PATH, *(str(entry["name"]) for entry in entries)}
    for index, container in enumerate(draft.containers):
        at = (*draft.at, "spec", "containers", index)
        draft.containers[index] = _with_files(draft, container, entries, names, at)
    _add_files(draft, [place.level], _wait(place.level, defaults, resources))


def add_worker_policy(
    draft: PodDraft,
    kind: ComponentType,
    policy: DeploymentPolicy,
    level_labels: Sequence[LevelLabels],
    defaults: PlanDefaults,
) -> None:
    """Add a worker's topology files, the init container that waits for them, and the policy's variables.

    Every container gets the policy, since any of them may register the worker. The init container waits for
    the policy's own level: a narrower one that a node lacks holds up no engine, and all levels come in one
    write.
    """
    resources = _take_back(draft, level_labels)
    entries = _variables(kind, policy, level_labels)
    for name, containers in (("initContainers", draft.init_containers), ("containers", draft.containers)):
        for index, container in enumerate(containers):
            if name == "containers" or is_sidecar(container):
                at = (*draft.at, "spec", name, index)
                containers[index] = _with_files(draft, container, entries, OWNED_ON_WORKERS, at)
    awaited = next(level for level in level_labels if level.domain == policy.domain)
    _add_files(draft, level_labels, _wait(awaited, defaults, resources))


def _with_files(
    draft: PodDraft, container: Manifest, entries: Sequence[Manifest], names: Collection[str], at: Path
) -> Manifest:
    """Return ``container`` with the files mounted, and ``entries`` as the only values of ``names``."""
    mount_path, problems = _mount_path(container, at)
    wired, warnings = owned(
        container, [*entries, variable(pod_template.TOPOLOGY_MOUNT_PATH, mount_path)], names, at
    )
    mounted, mounts = _mounted(wired, mount_path, at)
    draft.warnings += [*problems, *warnings, *mounts]
    return mounted


def _add_files(draft: PodDraft, level_labels: Sequence[LevelLabels], wait: Manifest) -> None:
    draft.volumes.append(
        {"name": VOLUME, "downwardAPI": {"items": listed([_file(level) for level in level_labels])}}
    )
    draft.init_containers.insert(0, wait)


def _take_back(draft: PodDraft, level_labels: Sequence[LevelLabels]) -> JsonValue:
    """Remove user-written entries under the operator's names. Return the resources that the user states for
    its init container, by name; None without them.
    """
    waits = [entry for entry in draft.init_containers if entry.get("name") == WAIT]
    resources = next((entry["resources"] for entry in waits if "resources" in entry), None)
    if all(entry.keys() <= {"name", "resources"} for entry in waits):
        draft.init_containers[:] = [entry for entry in draft.init_containers if entry not in waits]
    for level in level_labels:
        if draft.labels.pop(level.pod_label, None) is not None:
            at = (*draft.at, "metadata", "labels", level.pod_label)
            draft.warnings.append(Problem(at, "is the node's to say, and is left out: remove it here"))
    for name, entries, ours in (
        ("volumes", draft.volumes, VOLUME),
        ("initContainers", draft.init_containers, WAIT),
    ):
        if ours in [entry.get("name") for entry in entries]:
            at = (*draft.at, "spec", name)
            draft.warnings.append(
                Problem(at, f"{ours!r} is the operator's own, and yours is left out: rename it")
            )
            entries[:] = [entry for entry in entries if entry.get("name") != ours]
    return resources


def _variables(
    kind: ComponentType, policy: DeploymentPolicy, level_labels: Sequence[LevelLabels]
) -> list[Manifest]:
    """Return the policy's variables. The prefill worker publishes the enforcement; decode workers only get
    their place, so that a new enforcement does not roll them.
    """
    found = [
        variable(pod_template.TOPOLOGY_ENABLED, "true"),
        variable(pod_template.TOPOLOGY_LEVELS, ",".join(level.domain for level in level_labels)),
        variable(pod_template.TRANSFER_DOMAIN, policy.domain),
    ]
    if kind is not ComponentType.DECODE:
        found.append(variable(pod_template.TRANSFER_ENFORCEMENT, policy.enforcement.value))
        if policy.preferred_weight is not None:
            found.append(variable(pod_template.TRANSFER_WEIGHT, str(policy.preferred_weight)))
    return found


def _mount_path(container: Manifest, at: Path) -> tuple[str, list[Problem]]:
    """Return where a container mounts the files: its own path, if a volume can be mounted there."""
    stated = value_of(container, pod_template.TOPOLOGY_MOUNT_PATH)
    if stated is None:
        return MOUNT_PATH, []
    if stated.startswith("/") and stated.strip("/") and ":" not in stated and "$(" not in stated:
        return stated, []
    must = f"{pod_template.TOPOLOGY_MOUNT_PATH} must be an absolute path without ':', not {stated!r}"
    return MOUNT_PATH, [Problem((*at, "env"), f"{must}; {MOUNT_PATH} is taken")]


def _mounted(container: Manifest, mount_path: str, at: Path) -> tuple[Manifest, list[Problem]]:
    """Return ``container`` with the volume at ``mount_path``, and without user-written mounts there."""
    own = objects(container.get("volumeMounts"))
    place = mount_path.rstrip("/")
    kept = [
        mount
        for mount in own
        if mount.get("name") != VOLUME and str(mount.get("mountPath", "")).rstrip("/") != place
    ]
    warnings = []
    if len(kept) < len(own):
        must = f"{mount_path} is where the topology files are; what you mount there is left out"
        warnings.append(Problem((*at, "volumeMounts"), must))
    mount: Manifest = {"name": VOLUME, "mountPath": mount_path, "readOnly": True}
    return {**container, "volumeMounts": listed([*kept, mount])}, warnings


def _file(level: LevelLabels) -> Manifest:
    """Return one file: its name is the domain, its content the pod's label."""
    field: JsonValue = {"fieldPath": f"metadata.labels['{level.pod_label}']"}
    return {"path": level.domain, "fieldRef": field}


def _wait(awaited: LevelLabels, defaults: PlanDefaults, resources: JsonValue) -> Manifest:
    """Return the init container, which waits for one level; ``resources`` are the user's, or None."""
    return {
        "name": WAIT,
        "image": defaults.wait_image or defaults.image,
        "command": ["kvrouter", "topology", "wait"],
        "args": [
            f"--mount-path={MOUNT_PATH}",
            f"--levels={awaited.domain}",
            f"--label={awaited.domain}={awaited.pod_label}",
            f"--timeout-s={defaults.wait_timeout_s}",
        ],
        "resources": defaults.wait_resources.manifest() if resources is None else resources,
        "securityContext": {**restricted(), "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}],
    }
