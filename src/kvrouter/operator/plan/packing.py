"""``packDomain``: required pod affinity that keeps pods in one domain of the deployment's topology."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.api.deployment import ComponentSpec, DeploymentSpec, DynamoGraphDeployment
from kvrouter.operator.api.grove import Level
from kvrouter.operator.api.names import PACKED_LABEL
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.plan.manifest import (
    DEPLOYMENT_LABEL,
    Manifest,
    labels_of,
    listed,
    mapping,
    objects,
    selector,
    strings,
)
from kvrouter.operator.plan.pod_template import PodDraft
from kvrouter.operator.policy import DeploymentPolicy, RawLabel
from kvrouter.settings.problems import Path, Problem, did_you_mean

PACKING_ANNOTATION = "kvrouter.dev/pack-level"
"""Annotation of Deployments: the level that their pods are packed into, ``domain=node label``."""

WELL_KNOWN = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
    "host": "kubernetes.io/hostname",
}
"""Kubernetes' own node labels by domain, for clusters without topologies."""

NEAR_WEIGHT = 100
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


class Packing(NamedTuple):
    """The level that a component's pods are packed into. ``is_shared``: all components with the deployment's
    packDomain share one domain; else the component has its own. ``near``: the deployment's level, in which
    its components prefer each other if some of them have a level of their own.
    """

    level: Level
    is_shared: bool
    near: Level | None = None

    @property
    def label_value(self) -> str:
        """The value of the label by which packed pods find each other.

        Pods that were planned with another level, or without one, attract no new pods: they may be anywhere.
        """
        digest = hashlib.sha256(self.level.label_key.encode()).hexdigest()[:8]
        return f"{self.level.domain}-{digest}"

    @property
    def annotation(self) -> str:
        """The value of :data:`PACKING_ANNOTATION`."""
        return f"{self.level.domain}={self.level.label_key}"


def read_packings(
    spec: DeploymentSpec,
    cluster_info: ClusterInfo,
    policy: DeploymentPolicy | None,
    last_levels: Sequence[Level] = (),
) -> tuple[dict[str, Packing], list[Problem]]:
    """Return the packing of each component by its name, and a warning for each unknown level. ``last_levels``
    are those of :data:`PACKING_ANNOTATION`: they hold while a level is unknown.
    """
    constraint = spec.topology_constraint
    if constraint is None:
        return {}, []
    warnings: list[Problem] = []

    def level_of(domain: str, at: Path) -> Level | None:
        level = _level(domain, constraint.cluster_topology_name, cluster_info, policy, last_levels)
        unknown = _unknown(domain, constraint.cluster_topology_name, cluster_info)
        is_of_policy = policy is not None and isinstance(policy.source, RawLabel) and policy.domain == domain
        if level is None and unknown is not None:
            warnings.append(Problem((*at, "packDomain"), f"{unknown}: pods are not packed by it"))
        elif level is not None and unknown is not None and not is_of_policy and level in last_levels:
            kept = f"{unknown}: pods stay packed by {level.label_key}, as before"
            warnings.append(Problem((*at, "packDomain"), kept))
        return level

    shared = None
    if constraint.pack_domain is not None:
        shared = level_of(constraint.pack_domain, ("spec", "topologyConstraint"))
    found: dict[str, Packing] = {}
    for index, component in enumerate(spec.components):
        own = component.topology_constraint
        if own is None or own.pack_domain == constraint.pack_domain:
            level, is_shared = shared, True
        else:
            at: Path = ("spec", "components", index, "topologyConstraint")
            level, is_shared = level_of(own.pack_domain, at), False
        if level is not None:
            found[component.name] = Packing(level, is_shared)
    if all(packing.is_shared for packing in found.values()):
        return found, warnings
    return {name: packing._replace(near=shared) for name, packing in found.items()}, warnings


def _level(
    domain: str,
    name: str,
    cluster_info: ClusterInfo,
    policy: DeploymentPolicy | None,
    last_levels: Sequence[Level],
) -> Level | None:
    """Return the topology's level, else the policy's node label for this domain, else the last known level;
    without topologies in the cluster, Kubernetes' own label. None if there is no label.
    """
    topology = cluster_info.topologies.get(name)
    key = None if topology is None else topology.label_key(domain)
    if key is None and policy is not None and policy.domain == domain:
        key = policy.source.key if isinstance(policy.source, RawLabel) else None
    if key is None:
        key = dict(last_levels).get(domain)
    if key is None and cluster_info.grove is Grove.ABSENT:
        key = WELL_KNOWN.get(domain)
    return None if key is None else Level(domain, key)


def _unknown(domain: str, name: str, cluster_info: ClusterInfo) -> str | None:
    """Return why the deployment's topology does not define ``domain``; None if it does, or need not."""
    topology = cluster_info.topologies.get(name)
    if topology is not None and domain not in topology.domains:
        has = f"has {', '.join(topology.domains)}" if topology.domains else "has none that can be used"
        return f"{domain!r} is no level of {name}, which {has}{did_you_mean(domain, topology.domains)}"
    if topology is not None:
        return None
    if cluster_info.grove is Grove.UNREAD:
        because = f" ({cluster_info.unread_because})" if cluster_info.unread_because else ""
        return f"has no effect: topology {name!r} could not be read{because}"
    if cluster_info.grove is Grove.PRESENT:
        return f"has no effect: topology {name!r} is not in this cluster"
    if domain in WELL_KNOWN:
        return None
    return (
        f"has no effect: this cluster has no topologies (grove.io) that say which node label {domain!r} is, "
        f"and without them it is one of {', '.join(WELL_KNOWN)}"
    )


def pack(
    deployment: DynamoGraphDeployment,
    drafts: Mapping[str, PodDraft],
    packings: Mapping[str, Packing],
) -> list[Problem]:
    """Add pod affinity to the pods of each component; return the problems with the form of their own
    affinity. ``drafts`` are by component, with their final labels.
    """
    shared = [drafts[name].labels for name, each in packings.items() if each.is_shared and name in drafts]
    problems: list[Problem] = []
    for component in deployment.spec.components:
        draft, packing = drafts.get(component.name), packings.get(component.name)
        if draft is not None and packing is not None:
            group = shared if packing.is_shared else [draft.labels]
            problems += _pack(draft, deployment, component, packing, group)
    return problems


def _pack(
    draft: PodDraft,
    deployment: DynamoGraphDeployment,
    component: ComponentSpec,
    packing: Packing,
    group: Sequence[Mapping[str, JsonValue]],
) -> list[Problem]:
    """Add the packing to a pod's own affinity; return the problems with its form.

    ``group`` are the labels of all pods that share the domain. The scheduler counts a pod for required terms
    only if it matches all of them. If the user's required terms do not match the group, packing is only
    preferred: otherwise the first pod would wait for ever for one that matches both. The other pods do not
    count that pod.
    """
    at = (*draft.at, "spec", "affinity")
    affinity = draft.spec.get("affinity")
    problems = [*_form_problems(affinity, at)]
    if problems:
        return problems
    pod_affinity = mapping(mapping(affinity).get("podAffinity"))
    required, preferred = objects(pod_affinity.get(REQUIRED)), objects(pod_affinity.get(PREFERRED))
    namespace = deployment.metadata.namespace or "default"
    matches_group = all(_matches(term, labels, namespace) for term in required for labels in group)
    term = _term(deployment, None if packing.is_shared else component, packing)
    if matches_group:
        required.append(term)
    else:
        preferred.append({"weight": NEAR_WEIGHT, "podAffinityTerm": term})
        draft.labels.pop(PACKED_LABEL)  # it may be elsewhere, and other pods must not follow it there
        must = (
            "requires other pods than those that packDomain packs, and the scheduler counts only pods that "
            f"match every required term: {packing.level.domain} is preferred, not required"
        )
        draft.warnings.append(Problem((*at, "podAffinity", REQUIRED), must))
    if packing.near is not None:
        near: Manifest = {
            "labelSelector": {"matchLabels": {DEPLOYMENT_LABEL: _name_of(deployment)}},
            "topologyKey": packing.near.label_key,
        }
        preferred.append({"weight": NEAR_WEIGHT, "podAffinityTerm": near})
    terms = {
        name: listed(entries) for name, entries in ((REQUIRED, required), (PREFERRED, preferred)) if entries
    }
    draft.spec["affinity"] = {**mapping(affinity), "podAffinity": {**pod_affinity, **terms}}
    draft.warnings += _spreading(draft, packing)
    return []


def packed_labels(draft: PodDraft, packing: Packing | None) -> None:
    """Set the label by which packed pods find each other; a user's own value is removed."""
    own = draft.labels.pop(PACKED_LABEL, None)
    if packing is not None:
        draft.labels[PACKED_LABEL] = packing.label_value
    if own not in (None, draft.labels.get(PACKED_LABEL)):
        at = (*draft.at, "metadata", "labels", PACKED_LABEL)
        draft.warnings.append(Problem(at, "is the operator's to say, and is left out: remove it here"))


def _name_of(deployment: DynamoGraphDeployment) -> JsonValue:
    return labels_of(deployment)[DEPLOYMENT_LABEL]


def _term(deployment: DynamoGraphDeployment, component: ComponentSpec | None, packing: Packing) -> Manifest:
    """Return the affinity term for the component's packed pods; with None for all that share the domain."""
    picks: Manifest = {DEPLOYMENT_LABEL: _name_of(deployment)}
    if component is not None:
        picks = strings(selector(deployment.metadata.name, component.name))
    picks[PACKED_LABEL] = packing.label_value
    return {"labelSelector": {"matchLabels": picks}, "topologyKey": packing.level.label_key}


def _form_problems(affinity: JsonValue, at: Path) -> Iterator[Problem]:
    if affinity is None:
        return
    if not isinstance(affinity, dict):
        yield Problem(at, "must be an object")
        return
    pod_affinity = affinity.get("podAffinity")
    if pod_affinity is None:
        return
    if not isinstance(pod_affinity, dict):
        yield Problem((*at, "podAffinity"), "must be an object")
        return
    for name in (REQUIRED, PREFERRED):
        terms = pod_affinity.get(name)
        if terms is not None and (not isinstance(terms, list) or len(objects(terms)) != len(terms)):
            yield Problem((*at, "podAffinity", name), "must be a list of objects")


def _matches(term: Manifest, labels: Mapping[str, JsonValue], namespace: str) -> bool:
    """Return whether an affinity term selects a pod in ``namespace`` with these labels. False where that
    depends on labels of namespaces or on the pod's own template, which a plan cannot know.
    """
    if any(term.get(name) for name in ("matchLabelKeys", "mismatchLabelKeys")):
        return False
    if term.get("namespaceSelector") is not None or not isinstance(term.get("labelSelector"), dict):
        return False
    namespaces = term.get("namespaces")
    if isinstance(namespaces, list) and namespaces and namespace not in namespaces:
        return False
    wanted = mapping(term.get("labelSelector"))
    has_labels = all(labels.get(key) == value for key, value in mapping(wanted.get("matchLabels")).items())
    return has_labels and all(_holds(each, labels) for each in objects(wanted.get("matchExpressions")))


def _holds(expression: Manifest, labels: Mapping[str, JsonValue]) -> bool:
    """Whether one entry of ``matchExpressions`` holds for these labels."""
    value, values = labels.get(str(expression.get("key"))), expression.get("values")
    is_listed = isinstance(values, list) and value in values
    match expression.get("operator"):
        case "In":
            return is_listed
        case "NotIn":
            return not is_listed
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False


def _spreading(draft: PodDraft, packing: Packing) -> Iterator[Problem]:
    """Yield a problem for each spread constraint of the pod that contradicts the packing."""
    for index, each in enumerate(objects(draft.spec.get("topologySpreadConstraints"))):
        is_hard = each.get("whenUnsatisfiable") != "ScheduleAnyway"
        if is_hard and each.get("topologyKey") == packing.level.label_key:
            must = (
                f"spreads pods over {packing.level.label_key}, and packDomain keeps them in one value of it: "
                "pods that cannot have both stay Pending, so remove one of them"
            )
            yield Problem((*draft.at, "spec", "topologySpreadConstraints", index), must)
