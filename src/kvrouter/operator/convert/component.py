"""Converts a component of Dynamo's: from ``spec.services`` (v1alpha1) or ``spec.components`` (v1beta1)."""

from dataclasses import dataclass

from pydantic import JsonValue

from kvrouter.operator.api.deployment import ComponentSpec, ComponentType
from kvrouter.operator.api.names import COMPONENT_PATTERN
from kvrouter.operator.convert.frontend import Places, as_our_frontend
from kvrouter.operator.convert.part import Json, Part, check_container, listed, named
from kvrouter.operator.plan.manifest import mapping, object_name, objects
from kvrouter.operator.plan.programs import Program, ProgramProtocol, arguments_of, program_of
from kvrouter.settings.problems import Path, Problem

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the mount of a container, and no file of ours
SHARED_MEMORY_DEFAULT = "8Gi"
"""The size of ``/dev/shm`` that Dynamo gives an engine without a stated size."""

CACHE_PATHS = {"vllm": "/root/.cache/vllm"}
"""Where Dynamo mounts a compilation cache without a path, by the kind of engine."""

GPU = "nvidia.com/gpu"

LOST = {
    "autoscaling": "Dynamo ignores it too: scale the component's Deployment by a HorizontalPodAutoscaler",
    "checkpoint": "engines start without checkpoints",
    "dynamoNamespace": "the operator gives each deployment a fleet of its own",
    "dynamoSidecar": "an engine is announced by a container that runs kvrouter worker",
    "eppConfig": "kvrouter's frontends pick workers themselves",
    "experimental": "kvrouter has none of a component's experimental fields",
    "failover": "there are no standby engines: replicas are the reserve",
    "frontendSidecar": "frontends are a component of their own: the sidecar is left out",
    "globalDynamoNamespace": "the operator gives each deployment a fleet of its own",
    "gpuMemoryService": "engines hold their GPUs' memory themselves",
    "ingress": "write an Ingress or HTTPRoute for the frontend's Service",
    "minAvailable": "pods are not scheduled as a gang",
    "modelRef": "the model's name is asked of the engine",
    "multinode": "a worker is one pod: run an engine of several nodes as a LeaderWorkerSet, whose leader has "
    "the label kvrouter.dev/engine",
    "providerOverride": "the operator writes Deployments, with Grove in the cluster or without",
    "roles": "a worker is one pod",
    "runtimeVersionOverride": "no image of Dynamo's has to be judged by its version",
}
"""Fields that kvrouter does not have, and what to do instead."""

LEFT_OUT = {
    "planner": "is left out: scale Deployments by a HorizontalPodAutoscaler or KEDA",
    "epp": "is left out: kvrouter's frontends pick workers themselves",
}
"""Types of components that kvrouter does not use, and why."""

ROLE_SWITCHES = {"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"}
ROLE_FLAG = "--disaggregation-mode"


@dataclass(slots=True)
class Component:
    """A component during its conversion. ``places`` are its paths in Dynamo's manifest, ``index`` is the
    position of its main container.
    """

    places: Places
    name: str
    fields: Json
    template: Json
    main: Json
    others: list[Json]
    index: int = 0

    def manifest(self) -> Json:
        """Return the component in the form of kvrouter's manifest."""
        spec = mapping(self.template.get("spec"))
        spec.pop("containers", None)
        if set(self.main) - {"name"} or self.others:
            main: Json = {"name": "main", **self.main}
            spec["containers"] = [*self.others[: self.index], main, *self.others[self.index :]]
        template: Json = {**self.template, "spec": spec} if spec else {**self.template}
        if not spec:
            template.pop("spec", None)
        return {**self.fields, "podTemplate": template} if template else self.fields

    def in_input(self, path: Path) -> Path:
        """Return the path in Dynamo's manifest for a ``path`` in the component."""
        places = self.places
        match path:
            case ("podTemplate", "spec", "containers", int() as index, *rest):
                if index == self.index:
                    return (*places.main, *rest)
                return (*places.spec, "containers", index - places.n_before, *rest)
            case ("podTemplate", "spec", *rest):
                return (*places.spec, *rest)
            case ("sharedMemorySize",) if "sharedMemorySize" in places.fields:
                return places.fields["sharedMemorySize"]
        return (*places.component, *path)


def of_service(name: str, service: Part, deployment: str, framework: str) -> Component | None:
    """Return the component for a service of v1alpha1; None if it is left out."""
    pod, pod_at = service.mapping("extraPodSpec"), (*service.at, "extraPodSpec")
    main_at: Path = (*pod_at, "mainContainer")
    main: Json = {**Part(pod, pod_at, service.notes).mapping("mainContainer"), "name": "main"}
    check_container(main, main_at, service.notes)
    others = listed(pod, "containers", pod_at, service.notes)
    listed(pod, "volumes", pod_at, service.notes)
    for name_of_list in ("mainContainer", "containers"):
        pod.pop(name_of_list, None)
    template: Json = {"spec": pod}
    _metadata(service, template)
    env = _environment(service, main, main_at)
    _resources(service, main)
    fields: dict[str, Path] = {}
    for probe in ("livenessProbe", "readinessProbe"):
        if probe in service:
            fields[probe] = (*service.at, probe)
            main.setdefault(probe, service.mapping(probe))
    fields["sharedMemorySize"] = (*service.at, "sharedMemory", "size")
    memory = service.part("sharedMemory")
    size: JsonValue = None
    if memory is not None:
        size = "0" if memory.switch("disabled") else memory.value("size")
        memory.close()
    _mounts(service, template, main, framework or _engine(main))
    if service.text("serviceName") not in ("", name):
        service.notes.changed((*service.at, "serviceName"), f"is left out: the component is called {name}")
    kind = _kind(service, "componentType", main, name)
    places = Places(service.at, pod_at, main_at, tuple(env), fields, n_before=1)
    found = Component(places, name, {}, template, main, others)
    return _completed(service, found, kind, size, deployment)


def of_entry(entry: Part, deployment: str, framework: str) -> Component | None:
    """Return the component for an entry of ``spec.components`` in v1beta1; None if it is left out."""
    name = entry.text("name")
    template = entry.mapping("podTemplate")
    template_at = (*entry.at, "podTemplate")
    spec = Part(template, template_at, entry.notes).mapping("spec")
    containers = listed(spec, "containers", (*template_at, "spec"), entry.notes)
    listed(spec, "volumes", (*template_at, "spec"), entry.notes)
    names = [container.get("name") for container in containers]
    index = names.index("main") if "main" in names else 0
    main: Json = containers.pop(index) if containers else {"name": "main"}
    main_at: Path = (*template_at, "spec", "containers", index)
    check_container(main, main_at, entry.notes)
    cache = entry.part("compilationCache")
    if cache is not None:
        path = cache.text("mountPath") or CACHE_PATHS.get(framework or _engine(main), "")
        _claim(template, main, cache.text("pvcName"), path, cache)
        cache.close()
    sidecar = entry.text("frontendSidecar")
    for at, container in reversed([*enumerate(containers)]) if sidecar else ():
        if container.get("name") == sidecar:
            entry.notes.lost(
                (*template_at, "spec", "containers", at + (at >= index)), LOST["frontendSidecar"]
            )
            del containers[at]
            index -= at < index
    kind = _kind(entry, "type", main, name)
    size = entry.value("sharedMemorySize")
    env = tuple((*main_at, "env", at) for at in range(len(objects(main.get("env")))))
    places = Places(entry.at, (*template_at, "spec"), main_at, env)
    found = Component(places, name, {}, template, main, containers, index)
    return _completed(entry, found, kind, size, deployment)


def _completed(
    part: Part, component: Component, kind: str | None, memory: JsonValue, deployment: str
) -> Component | None:
    """Convert the fields that both versions have, and close ``part``."""
    if kind is None or kind in LEFT_OUT:
        if kind is not None:
            part.notes.lost(part.at, LEFT_OUT[kind])
        return None
    name = named(component.name, COMPONENT_PATTERN)
    if name != component.name:
        part.notes.changed(part.at, f"is called {name}: a component's name is of letters, digits and '-'")
    component.name = name
    component.fields = {"name": name, "type": kind}
    replicas = part.number("replicas")
    if _is_scaled(part):
        target = object_name(deployment, name)
        part.notes.changed(
            (*part.at, "scalingAdapter"),
            f"is the Deployment {target}, which an autoscaler scales by itself"
            + ("" if replicas is None else f": replicas ({replicas}) are left out for it"),
        )
    elif replicas is not None:
        component.fields["replicas"] = replicas
    component.fields |= part.fields(ComponentSpec)
    is_frontend = kind == ComponentType.FRONTEND
    if is_frontend:
        as_our_frontend(component.main, component.places, part.notes)
    runs_kvrouter = is_frontend or program_of(component.main).protocol is ProgramProtocol.KVROUTER
    if memory is not None or not runs_kvrouter:
        _shared_memory(part, component, memory)
    _without_effect(part)
    part.close(LOST)
    return component


def _without_effect(part: Part) -> None:
    """Take fields without effect: switches that are off, and fields that Dynamo itself ignores."""
    for name in ("ingress", "checkpoint", "gpuMemoryService", "failover", "globalDynamoNamespace"):
        part.drop_off(name)
    for name in ("autoscaling", "dynamoNamespace"):
        if name in part:
            part.value(name)
            part.notes.changed((*part.at, name), f"is left out: {LOST[name]}")


def _is_scaled(part: Part) -> bool:
    """Whether an autoscaler sets the number of pods: v1alpha1 has a switch, v1beta1 the field alone."""
    adapter = part.part("scalingAdapter")
    if adapter is None:
        return False
    is_on = adapter.switch("enabled") if "enabled" in adapter else True
    adapter.close()
    return is_on


def _kind(part: Part, key: str, main: Json, name: str) -> str | None:
    """Return the component's type, or that of a component to leave out; None without a type."""
    stated, role = part.text(key), part.text("subComponentType")
    program = program_of(main)
    of_args = _role_of(arguments_of(main))
    if stated == ComponentType.WORKER and role:
        if role in ("prefill", "decode"):
            return role
        part.notes.lost(part.at, f"is left out: kvrouter has no workers that {role}")
        return None
    if stated == ComponentType.WORKER and of_args:
        part.notes.changed((*part.at, key), f"is {of_args}, as its args say")
        return of_args
    if stated in (*ComponentType, *LEFT_OUT):
        return stated
    found = of_args or _kind_of_program(program, name)
    if found is None:
        known = ", ".join(ComponentType)
        part.notes.problems.append(Problem((*part.at, key), f"is needed, one of {known}, not {stated!r}"))
    else:
        part.notes.changed((*part.at, key), f"is {found}, as what it runs says")
    return found


def _kind_of_program(program: Program, name: str) -> str | None:
    last = program.name.rpartition(".")[2]
    if last == "frontend" or "frontend" in name.lower():
        return ComponentType.FRONTEND.value
    if last in LEFT_OUT or "planner" in name.lower():
        return last if last in LEFT_OUT else "planner"
    is_worker = program.engine is not None or last in ("mocker", "worker")
    return ComponentType.WORKER.value if is_worker else None


def _role_of(arguments: list[str]) -> str | None:
    """Return the role that an engine's own flags set; None if they set no role."""
    for at, arg in enumerate(arguments):
        flag, joint, value = arg.partition("=")
        if flag in ROLE_SWITCHES:
            return ROLE_SWITCHES[flag]
        if flag == ROLE_FLAG:
            role = value if joint else "".join(arguments[at + 1 : at + 2])
            return role if role in ("prefill", "decode") else None
    return None


def _engine(main: Json) -> str:
    return program_of(main).engine or ""


def _metadata(service: Part, template: Json) -> None:
    """Move a service's labels and annotations to its pods."""
    extra = service.part("extraPodMetadata")
    metadata: Json = {}
    for key in ("labels", "annotations"):
        found = {**service.mapping(key), **(extra.mapping(key) if extra else {})}
        if found:
            metadata[key] = found
    if extra is not None:
        extra.close()
    if metadata:
        template["metadata"] = metadata


def _environment(service: Part, main: Json, main_at: Path) -> list[Path]:
    """Add a service's variables before those of its main container, which take precedence. Return the path of
    each.
    """
    own = objects(main.get("env"))
    names = [entry.get("name") for entry in own]
    env: list[Json] = []
    places: list[Path] = []
    for index, entry in enumerate(service.objects("envs")):
        if entry.get("name") not in names:
            env.append(entry)
            places.append((*service.at, "envs", index))
    if env or own:
        main["env"] = [*env, *own]
    secret = service.text("envFromSecret")
    if secret:
        main["envFrom"] = [{"secretRef": {"name": secret}}, *objects(main.get("envFrom"))]
    return [*places, *((*main_at, "env", index) for index in range(len(own)))]


def _resources(service: Part, main: Json) -> None:
    stated = service.part("resources")
    if stated is None:
        return
    own = mapping(main.get("resources"))
    for key in ("requests", "limits"):
        item = stated.part(key)
        if item is None:
            continue
        gpu = item.text("gpuType") or GPU
        amounts: Json = {name: item.value(name) for name in ("cpu", "memory") if name in item}
        if "gpu" in item:
            amounts[gpu] = item.value("gpu")
        amounts |= item.mapping("custom")
        item.close()
        own[key] = {**amounts, **mapping(own.get(key))}
    claims = stated.objects("claims")
    if claims:
        own["claims"] = [*claims, *objects(own.get("claims"))]
    stated.close()
    main["resources"] = own


def _mounts(service: Part, template: Json, main: Json, engine: str) -> None:
    for mount in service.parts("volumeMounts"):
        name, path = mount.text("name"), mount.text("mountPoint")
        is_cache = mount.switch("useAsCompilationCache")
        _claim(template, main, name, path or (CACHE_PATHS.get(engine, "") if is_cache else ""), mount)
        mount.close()


def _claim(template: Json, main: Json, name: str, path: str, part: Part) -> None:
    """Mount a PersistentVolumeClaim by its name."""
    if not name or not path:
        part.notes.problems.append(Problem(part.at, "needs the name of a claim, and a path to mount it at"))
        return
    volume: Json = {"name": name, "persistentVolumeClaim": {"claimName": name}}
    _mount(template, main, volume, path)


def _mount(template: Json, main: Json, volume: Json, path: str) -> None:
    """Add a volume unless one has its name, and mount it unless its path is in use."""
    spec = mapping(template.get("spec"))
    volumes, mounts = objects(spec.get("volumes")), objects(main.get("volumeMounts"))
    if volume["name"] not in [each.get("name") for each in volumes]:
        spec["volumes"] = [*volumes, volume]
    if path not in [each.get("mountPath") for each in mounts]:
        main["volumeMounts"] = [*mounts, {"name": volume["name"], "mountPath": path}]
    template["spec"] = spec


def _shared_memory(part: Part, component: Component, size: JsonValue) -> None:
    """Set the size of ``/dev/shm``: Dynamo gives every engine 8Gi, kvrouter's operator only a stated size."""
    if SHARED_MEMORY in [each.get("mountPath") for each in objects(component.main.get("volumeMounts"))]:
        return
    component.fields["sharedMemorySize"] = SHARED_MEMORY_DEFAULT if size is None else str(size)
    if size is None:
        text = f"has {SHARED_MEMORY_DEFAULT} at {SHARED_MEMORY}, which Dynamo gives engines by itself"
        part.notes.changed(part.at, text)
