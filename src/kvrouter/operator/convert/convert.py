"""Converts documents: DynamoGraphDeployments become kvrouter's, the objects that they use stay."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.admission.validate import name_problems
from kvrouter.operator.api.deployment import (
    API_VERSION,
    GROUP,
    KIND,
    OPERATORS_PREFIX,
    RESERVED_LABELS,
    RESERVED_LABELS_PREFIXES,
    DeploymentSpec,
    DynamoGraphDeployment,
    Experimental,
    SpecTopologyConstraint,
    read_deployment,
)
from kvrouter.operator.api.names import SERVICE_PATTERN
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.convert.component import Component, of_entry, of_service
from kvrouter.operator.convert.frontend import kept_env
from kvrouter.operator.convert.part import Json, Note, Notes, Part, named
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import mapping, objects
from kvrouter.operator.plan.plan import plan
from kvrouter.operator.plan.pod_template import read_pod_template
from kvrouter.operator.plan.programs import unregistered
from kvrouter.settings.problems import Path, Problem

VERSIONS = (f"{GROUP}/v1alpha1", f"{GROUP}/v1beta1")
SCALING_ADAPTER = "DynamoGraphDeploymentScalingAdapter"
DYNAMO_ANNOTATIONS = f"{GROUP}/"

OF_STORED_OBJECTS = (
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)
"""Fields of metadata that an API server or Dynamo's operator sets; manifests do not state them."""

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

LOST = {
    "restart": "use kubectl rollout restart on the Deployments with the label kvrouter.dev/deployment",
    "providerOverride": "the operator writes Deployments, with Grove in the cluster or without",
}


class Conversion(NamedTuple):
    """The manifests from one document, and the notes on its fields. ``problems`` leave no manifests."""

    manifests: tuple[Json, ...]
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...] = ()


def convert(document: Mapping[str, JsonValue]) -> Conversion:
    """Return the manifests of one document, any mapping of YAML or JSON. Never raises."""
    notes = Notes()
    manifests = tuple(_objects(document, (), notes))
    if notes.problems:
        return Conversion((), tuple(notes.found), tuple(notes.problems))
    return Conversion(manifests, tuple(notes.found))


def _objects(document: Mapping[str, JsonValue], at: Path, notes: Notes) -> Iterator[Json]:
    """Yield the objects of a document, which may be a list as ``kubectl get -o yaml`` writes it."""
    kind, version = document.get("kind"), document.get("apiVersion")
    items = document.get("items")
    if not isinstance(kind, str) or not isinstance(version, str):
        name = "kind" if isinstance(version, str) else "apiVersion"
        notes.problems.append(Problem((*at, name), "is needed, as text"))
    elif kind.endswith("List") and isinstance(items, list):
        around = Part(document, at, notes)
        for name in ("kind", "apiVersion", "metadata", "items"):
            around.value(name)
        around.close()
        for index, item in enumerate(items):
            if isinstance(item, dict):
                yield from _objects(item, (*at, "items", index), notes)
            else:
                notes.problems.append(Problem((*at, "items", index), "must be a mapping"))
    elif kind == KIND and version.startswith(f"{GROUP}/"):
        yield from _deployment(Part(document, at, notes))
    elif version.startswith(f"{GROUP}/") and kind.startswith("Dynamo"):
        notes.lost(at, f"{kind} is left out: kvrouter has no such kind")
    else:
        yield _passed(document, at, notes)


def _passed(document: Mapping[str, JsonValue], at: Path, notes: Notes) -> Json:
    """Return another object as it is; an autoscaler of a component then scales its Deployment."""
    spec = mapping(document.get("spec"))
    target = mapping(spec.get("scaleTargetRef"))
    if target.get("kind") != SCALING_ADAPTER:
        return {**document}
    notes.changed((*at, "spec", "scaleTargetRef"), "is the component's Deployment, of the same name")
    target |= {"apiVersion": "apps/v1", "kind": "Deployment"}
    return {**document, "spec": {**spec, "scaleTargetRef": target}}


def _deployment(document: Part) -> Iterator[Json]:
    """Yield a deployment of either version, and the claims that Dynamo's operator would make for it."""
    notes, at = document.notes, document.at
    version = document.text("apiVersion")
    if version not in VERSIONS:
        must = f"must be {' or '.join(VERSIONS)}, not {version!r}"
        notes.problems.append(Problem((*at, "apiVersion"), must))
        return
    for name in ("kind", "status"):
        document.value(name)
    metadata = _metadata(document)
    spec = document.part("spec")
    document.close()
    if spec is None:
        notes.problems.append(Problem((*at, "spec"), "is needed"))
        return
    namespace = metadata.get("namespace")
    for claim in spec.parts("pvcs"):
        made = _claim(claim, namespace if isinstance(namespace, str) else "")
        if made is not None:
            yield made
    renamed = {"env": "envs"} if "envs" in spec else {}
    components = [*_components(spec, str(metadata.get("name") or ""))]
    converted = _spec(spec, components)
    spec.close(LOST)
    result: Json = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": converted}
    if not notes.problems:  # further problems would only follow from these
        _check(result, components, spec.at, renamed, notes)
    yield result


def _metadata(document: Part) -> Json:
    notes, at = document.notes, (*document.at, "metadata")
    metadata = document.mapping("metadata")
    for stored in OF_STORED_OBJECTS:
        metadata.pop(stored, None)
    name = metadata.get("name")
    if isinstance(name, str) and name:
        ours = named(name, SERVICE_PATTERN).lower()
        if ours != name:
            notes.changed((*at, "name"), f"is {ours}: it becomes the name of Services")
        metadata["name"] = ours
    elif not metadata.get("generateName"):
        notes.problems.append(Problem((*at, "name"), "is needed, as text"))
    annotations = Part(metadata, at, notes).mapping("annotations")
    metadata.pop("annotations", None)
    for key in [*annotations]:
        if key == LAST_APPLIED:
            del annotations[key]
        elif key.startswith(DYNAMO_ANNOTATIONS):
            del annotations[key]
            notes.lost((*at, "annotations", key), "is left out: only Dynamo's operator reads it")
    if annotations:
        metadata["annotations"] = annotations
    return metadata


def _claim(claim: Part, namespace: str) -> Json | None:
    """Return the PersistentVolumeClaim that Dynamo's operator would make; None if it exists already."""
    name, is_new = claim.text("name"), claim.switch("create")
    storage_class, mode = claim.text("storageClass"), claim.text("volumeAccessMode")
    size = claim.value("size")
    claim.close()
    if not is_new:
        return None
    needed: Json = {"name": name, "size": size, "volumeAccessMode": mode}
    for field, value in needed.items():
        if not value:
            claim.notes.problems.append(Problem((*claim.at, field), "is needed for a claim that is created"))
    claim.notes.changed(claim.at, "is a PersistentVolumeClaim of its own, which outlives the deployment")
    spec: Json = {"accessModes": [mode], "resources": {"requests": {"storage": str(size)}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    metadata: Json = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _components(spec: Part, deployment: str) -> Iterator[Component]:
    """Yield the components in the manifest's order: from a mapping in v1alpha1, from a list in v1beta1."""
    framework = spec.text("backendFramework")
    if framework:
        spec.notes.changed(
            (*spec.at, "backendFramework"), "is left out: each worker says which engine it has"
        )
    found: list[Component | None] = []
    stated = spec.mapping("services")
    services = Part({name: stated[name] or {} for name in stated}, (*spec.at, "services"), spec.notes)
    for name in services.names:
        service = services.part(name)
        if service is not None:
            found.append(of_service(name, service, deployment, framework))
    found += [of_entry(entry, deployment, framework) for entry in spec.parts("components")]
    if not found:
        spec.notes.problems.append(Problem(spec.at, "has no services and no components"))
    elif not any(found) and not spec.notes.problems:
        spec.notes.problems.append(
            Problem(spec.at, "has nothing that kvrouter runs: every component is left out")
        )
    yield from (component for component in found if component is not None)


def _spec(spec: Part, components: list[Component]) -> Json:
    """Return the converted spec with its components."""
    notes = spec.notes
    converted: Json = {}
    for key in ("labels", "annotations"):
        found = spec.mapping(key)
        for label in [*found]:
            if _is_reserved(label, is_label=key == "labels"):
                del found[label]
                notes.lost((*spec.at, key, label), "is left out: the operator sets it")
        if found:
            converted[key] = found
    for key in ("env", "envs"):
        stated = spec.objects(key)
        env = kept_env(stated, [(*spec.at, key, index) for index in range(len(stated))], notes)
        if env:
            converted["env"] = [*objects(converted.get("env")), *env]
    topology = spec.part("topologyConstraint")
    if topology is not None:
        profile = topology.text("topologyProfile")
        constraint = topology.fields(SpecTopologyConstraint)
        converted["topologyConstraint"] = {
            **({"clusterTopologyName": profile} if profile else {}),
            **constraint,
        }
        topology.close()
    experimental = spec.part("experimental")
    if experimental is not None:
        fields = experimental.fields(Experimental)
        if fields:
            converted["experimental"] = fields
        experimental.close({"componentGroups": "components scale each by themselves"})
    converted |= spec.fields(DeploymentSpec)
    return {**converted, "components": [component.manifest() for component in components]}


def _is_reserved(key: str, *, is_label: bool) -> bool:
    prefixes = RESERVED_LABELS_PREFIXES if is_label else (OPERATORS_PREFIX,)
    return key.startswith(prefixes) or (is_label and key in RESERVED_LABELS)


def _check(
    result: Json, components: list[Component], at: Path, renamed: Mapping[str, str], notes: Notes
) -> None:
    """Validate the result as admission does, and note workers that never register, at the input's paths."""
    reading = read_deployment(result)
    problems = list(reading.problems)
    if reading.deployment is not None:
        problems += _planned(reading.deployment)
        for index, component in enumerate(reading.deployment.spec.components):
            draft = read_pod_template(component, ("spec", "components", index))
            if isinstance(draft, list):
                continue
            for warning in unregistered(draft, component.type):
                notes.lost(_in_input(warning.path, components, at, renamed), warning.must)
    for problem in problems:
        notes.problems.append(Problem(_in_input(problem.path, components, at, renamed), problem.must))


def _planned(deployment: DynamoGraphDeployment) -> list[Problem]:
    planned = plan(deployment, ClusterInfo(), PlanDefaults(image="kvrouter"))
    return [*name_problems(deployment), *planned.problems]


def _in_input(path: Path, components: list[Component], at: Path, renamed: Mapping[str, str]) -> Path:
    """Return the path in Dynamo's manifest for a ``path`` in the result."""
    match path:
        case ("spec", "components", int() as index, *rest) if index < len(components):
            return components[index].in_input(tuple(rest))
        case ("spec", str() as first, *rest):
            return (*at, renamed.get(first, first), *rest)
    return (*at[:-1], *path)
