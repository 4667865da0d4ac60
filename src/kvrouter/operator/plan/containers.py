"""Completes a component's containers: image, command, variables, ports, probes, grace period."""

from collections.abc import Sequence
from itertools import count

from pydantic import JsonValue

from kvrouter.operator.api.deployment import (
    ComponentSpec,
    ComponentType,
    DeploymentSpec,
    DynamoGraphDeployment,
)
from kvrouter.operator.api.names import is_nothing
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import Manifest, fleet_name, listed, mapping, objects
from kvrouter.operator.plan.pod_template import (
    PodDraft,
    entry_of,
    offered,
    read_pod_template,
    value_of,
    variable,
)
from kvrouter.settings.problems import Problem
from kvrouter.settings.tree import AdminAccess

HTTP_PORT = 8000
HTTP_PORT_VARIABLE = "DYN_HTTP_PORT"
PORT_DIGITS_MAX = 5
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
HEALTH_PORT = 9190
"""The first probe port of a worker pod: each container has its own, in case it runs a worker."""

HEALTH_PORT_VARIABLE = "KVROUTER_HEALTH_PORT"
FIXED_PORTS = {HEALTH_PORT_VARIABLE: "--health-port", "KVROUTER_LISTEN_PORT": "--listen-port"}
"""Variables and flags that fix a worker's ports; the worker chooses its other ports."""

ENGINE_PORT_FLAG = "--port"
"""The port flag of the servers of vLLM, SGLang and TensorRT-LLM."""

HOST_DNS = "ClusterFirstWithHostNet"
"""DNS policy of a pod in its node's network, whose resolver knows no Service."""
GRACE_S = 60
"""Longer than a drain's own limit of 30 s and the time before it."""

LEAVING_S = 5
"""How long a terminating frontend keeps taking requests: until then Services still send it some."""

RUN_AS_USER = 65_532
SHARED_MEMORY = "shared-memory"
SHARED_MEMORY_PATH = "/dev/shm"  # noqa: S108 - where every program looks for it

WHERE_WORKERS_ARE = frozenset(
    {
        *("DYN_NAMESPACE", "KVROUTER_NAMESPACE", "--namespace"),
        *("DYN_DISCOVERY_BACKEND", "KVROUTER_DISCOVERY_BACKEND", "--discovery", "--discovery-backend"),
        "--static-endpoint",
    }
)
"""Variables and flags of a frontend that set where it discovers workers."""


def restricted() -> Manifest:
    """Return the security context of kvrouter's own containers: Kubernetes' restricted standard."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": RUN_AS_USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def complete(
    draft: PodDraft,
    deployment: DynamoGraphDeployment,
    component: ComponentSpec,
    defaults: PlanDefaults,
    shared: Sequence[Manifest] = (),
) -> list[Problem]:
    """Complete the containers of ``draft``, with the ``shared`` variables before the operator's own; return
    the problems that keep its pods from running.
    """
    is_frontend = component.type is ComponentType.FRONTEND
    at = (*draft.at, "spec", "containers")
    if not draft.containers:
        if not is_frontend:
            return [Problem(at, _missing_engine(component))]
        draft.containers = [{"name": "main"}]
    problems: list[Problem] = []
    for index, container in enumerate(draft.containers):
        if container.get("image"):
            continue
        if not is_frontend and not container.get("command") and not container.get("args"):
            must = "needs an image, or args for kvrouter's own, such as [worker, vllm, --url, …]"
            problems.append(Problem((*at, index), must))
            continue
        draft.containers[index] = _of_our_image(container, defaults)
    for entries in (shared, _variables(deployment, component, defaults)):
        draft.containers = [offered(container, entries) for container in draft.containers]
        draft.init_containers = [
            offered(container, entries) if is_sidecar(container) else container
            for container in draft.init_containers
        ]
    if is_frontend:
        draft.main.setdefault("resources", defaults.frontend_resources.manifest())
        _add_port_and_probes(draft)
    else:
        ports = count(HEALTH_PORT)
        draft.containers = [_with_health(container, next(ports)) for container in draft.containers]
        draft.init_containers = [
            _with_health(container, next(ports)) if is_sidecar(container) else container
            for container in draft.init_containers
        ]
    problems += _give_shared_memory(draft, component)
    if draft.spec.get("hostNetwork") is True:
        draft.spec.setdefault("dnsPolicy", HOST_DNS)
        draft.warnings += _share_host(draft, component)
    draft.spec.setdefault("enableServiceLinks", False)  # a Service's variables could be read as settings
    draft.spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    return problems


def _missing_engine(component: ComponentSpec) -> str:
    """Return what to write for a component without containers: there is no default engine."""
    args = f"[worker, mock, --role, {component.type.role}]"
    return (
        f"is needed: the container of {component.name}'s engine, called main. To try it without a GPU add "
        f"`podTemplate: {{spec: {{containers: [{{name: main, args: {args}}}]}}}}`; for engines: "
        "docs/kubernetes-operate.md, 'What a worker's pod runs'"
    )


def registers_elsewhere(spec: DeploymentSpec) -> str | None:
    """Return why workers of this deployment may be registered where the operator does not look: its frontends
    set themselves where they discover workers. None if they do not.
    """
    shared = sorted({entry.name for entry in spec.env} & WHERE_WORKERS_ARE)
    if shared:
        return f"spec.env says {shared[0]} itself"
    for index, component in enumerate(spec.components):
        draft = read_pod_template(component, ("spec", "components", index, "podTemplate"))
        if component.type is not ComponentType.FRONTEND or isinstance(draft, list):
            continue
        for container in draft.containers:
            names = {str(entry.get("name")) for entry in objects(container.get("env"))}
            lists = [container.get("command"), container.get("args")]
            flags = [str(arg).partition("=")[0] for each in lists if isinstance(each, list) for arg in each]
            names_set = sorted(names & WHERE_WORKERS_ARE) or sorted(set(flags) & WHERE_WORKERS_ARE)
            if names_set:
                return f"{component.name} says {names_set[0]} itself"
    return None


def is_sidecar(container: Manifest) -> bool:
    """Whether an init container is a sidecar: it keeps running beside the other containers."""
    return container.get("restartPolicy") == "Always"


def http_port(container: Manifest) -> int:
    """Return the port that a frontend listens on, from its variable or the default."""
    return _port(value_of(container, HTTP_PORT_VARIABLE) or "") or HTTP_PORT


def _port(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) <= PORT_DIGITS_MAX
    return int(text) if is_number and 0 < int(text) < 65_536 else None


def _port_warnings(draft: PodDraft) -> list[Problem]:
    """Return warnings about a frontend's port that its Service and probes cannot follow."""
    container, port = draft.main, http_port(draft.main)
    at = (*draft.at, "spec", "containers", draft.main_index)
    found = []
    entry = entry_of(container, HTTP_PORT_VARIABLE) or {}
    name = entry.get("name")
    if "valueFrom" in entry:
        must = f"{name} is not written here, so the Service and the probes take {port}: write its value"
        found.append(Problem((*at, "env"), must))
    elif _port(str(entry.get("value"))) is None:
        must = f"{name} must be a port from 1 to 65535, not {entry.get('value')!r}: frontends end with it"
        found.append(Problem((*at, "env"), must))
    stated = flag_of(container, "--http-port")
    if stated is not None and stated != str(port):
        must = (
            f"--http-port {stated} counts for the frontend, and the Service and the probes take {port}: "
            f"write it as {HTTP_PORT_VARIABLE}"
        )
        found.append(Problem((*at, "args"), must))
    for probe in PROBES:
        asked = _probe_port(container, probe)
        if asked is not None and asked != port:
            must = f"asks port {asked}, and the frontend listens on {port} ({HTTP_PORT_VARIABLE})"
            found.append(Problem((*at, probe), must))
    return found


def flag_of(container: Manifest, flag: str) -> str | None:
    """Return the value of a flag among a container's arguments; None without the flag."""
    lists = [container.get("command"), container.get("args")]
    arguments = [str(arg) for each in lists if isinstance(each, list) for arg in each]
    for index, arg in enumerate(arguments):
        name, joint, value = arg.partition("=")
        if name == flag:
            return value if joint else "".join(arguments[index + 1 : index + 2])
    return None


def _probe_port(container: Manifest, probe: str) -> JsonValue:
    """Return the port number that a probe asks; None without one, or for an unknown name."""
    found = mapping(container.get(probe))
    port = mapping(found.get("httpGet")).get("port") or mapping(found.get("tcpSocket")).get("port")
    if isinstance(port, str) and not port.isdigit():
        named = {entry.get("name"): entry.get("containerPort") for entry in objects(container.get("ports"))}
        return named.get(port)
    return int(port) if isinstance(port, str) else port


def _of_our_image(container: Manifest, defaults: PlanDefaults) -> Manifest:
    """Return ``container`` with kvrouter's image and command; without args it runs the frontend."""
    runs: Manifest = {} if container.get("command") else {"command": ["kvrouter"]}
    if not container.get("command") and not container.get("args"):
        runs["args"] = ["frontend"]
    return {"securityContext": restricted(), **container, "image": defaults.image, **runs}


def _variables(
    deployment: DynamoGraphDeployment, component: ComponentSpec, defaults: PlanDefaults
) -> list[Manifest]:
    metadata = deployment.metadata
    found = [
        variable("DYN_NAMESPACE", fleet_name(metadata.namespace, metadata.name)),
        variable("DYN_DISCOVERY_BACKEND", defaults.discovery.value),
        variable("DYN_REQUEST_PLANE", defaults.request_plane.value),
        variable("DYN_EVENT_PLANE", defaults.event_transport.value),
        _field("POD_NAME", "metadata.name"),
        _field("POD_UID", "metadata.uid"),
        _field("POD_NAMESPACE", "metadata.namespace"),
    ]
    if defaults.nats_server is not None:
        found.append(variable("NATS_SERVER", defaults.nats_server))
    if defaults.plane_token is not None:
        token: JsonValue = {"name": defaults.plane_token.name, "key": defaults.plane_token.key}
        found.append({"name": "KVROUTER_PLANE_TOKEN", "valueFrom": {"secretKeyRef": token}})
    if component.type is ComponentType.FRONTEND:
        found.append(variable("DYN_HTTP_HOST", "0.0.0.0"))  # noqa: S104 - the cluster connects to the pod
        found.append(variable(HTTP_PORT_VARIABLE, str(HTTP_PORT)))
        found += _admin(defaults)
    else:
        found.append(variable("KVROUTER_LISTEN_HOST", "0.0.0.0"))  # noqa: S104 - as above
        found.append(_field("KVROUTER_ADVERTISE_HOST", "status.podIP"))
        found.append(_field("POD_NODE_NAME", "spec.nodeName"))
    return found


def _admin(defaults: PlanDefaults) -> list[Manifest]:
    """Return the variables of the admin routes, which change how all requests are routed: they are closed
    except to clients with the token of the Secret.

    A frontend of an older image ends at a ``KVROUTER_*`` variable that it does not know, and ignores an
    unknown ``DYN_*`` one: its admin routes are then as that version has them.
    """
    token: JsonValue = {"name": defaults.admin_token.name, "key": defaults.admin_token.key, "optional": True}
    return [
        variable("DYN_ADMIN_ROUTES", AdminAccess.CLOSED.value),
        {"name": "KVROUTER_ADMIN_TOKEN", "valueFrom": {"secretKeyRef": token}},
    ]


def _field(name: str, path: str) -> Manifest:
    """Return a variable with a field of the pod, by the Downward API."""
    field: JsonValue = {"fieldRef": {"fieldPath": path}}
    return {"name": name, "valueFrom": field}


def _give_shared_memory(draft: PodDraft, component: ComponentSpec) -> list[Problem]:
    """Mount memory of the stated size at ``/dev/shm`` in every container and sidecar without a mount there;
    return the problems that prevent it.
    """
    size, at = component.shared_memory_size, (*draft.at, "spec")
    if size is None or is_nothing(size):
        return []
    if SHARED_MEMORY in [volume.get("name") for volume in draft.volumes]:
        must = (
            f"is a volume {SHARED_MEMORY}, and podTemplate.spec.volumes has one of that name: leave one out"
        )
        return [Problem((*draft.at[:-1], "sharedMemorySize"), must)]
    draft.volumes.append({"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}})
    for name, containers in (("containers", draft.containers), ("initContainers", draft.init_containers)):
        for index, container in enumerate(containers):
            mounts = objects(container.get("volumeMounts"))
            if name == "initContainers" and not is_sidecar(container):
                continue
            if any(str(mount.get("mountPath", "")).rstrip("/") == SHARED_MEMORY_PATH for mount in mounts):
                must = f"has its own {SHARED_MEMORY_PATH}, so sharedMemorySize has no effect there"
                draft.warnings.append(Problem((*at, name, index, "volumeMounts"), must))
                continue
            mount: Manifest = {"name": SHARED_MEMORY, "mountPath": SHARED_MEMORY_PATH}
            containers[index] = {**container, "volumeMounts": listed([*mounts, mount])}
    return []


def _share_host(draft: PodDraft, component: ComponentSpec) -> list[Problem]:
    """Declare the ports that a pod takes on its node, so that the scheduler keeps pods of one port apart.

    The second pod of a node would find undeclared ports taken, again and again.
    """
    for containers in (draft.containers, draft.init_containers):
        containers[:] = [_with_declared_ports(container) for container in containers]
    taken = {
        port
        for container in (*draft.containers, *draft.init_containers)
        for entry in objects(container.get("ports"))
        if isinstance(port := entry.get("containerPort"), int)
    }
    if not taken:
        return []
    is_frontend = component.type is ComponentType.FRONTEND
    must = (
        f"pods take {', '.join(map(str, sorted(taken)))} of their nodes: a node holds one pod of a port, and "
        "those without a node stay Pending. Components that share nodes need other ports "
        f"({HTTP_PORT_VARIABLE if is_frontend else HEALTH_PORT_VARIABLE})"
    )
    return [Problem((*draft.at, "spec", "hostNetwork"), must)]


def _with_declared_ports(container: Manifest) -> Manifest:
    """Return ``container`` with the ports of its worker or engine server, and those that its probes ask,
    among its declared ports.
    """
    ports = objects(container.get("ports"))
    there = [entry.get("containerPort") for entry in ports]
    texts = [
        *(value_of(container, name) for name in FIXED_PORTS),
        *(flag_of(container, flag) for flag in (*FIXED_PORTS.values(), ENGINE_PORT_FLAG)),
        *(str(_probe_port(container, probe)) for probe in PROBES),
    ]
    stated = {port for text in texts if (port := _port(text or "")) is not None} - {*there}
    added: list[Manifest] = [{"containerPort": port, "protocol": "TCP"} for port in sorted(stated)]
    return {**container, "ports": listed([*ports, *added])} if added else container


def _add_port_and_probes(draft: PodDraft) -> None:
    """Add the port, the probes and the time to leave to a frontend, each unless the user states it."""
    draft.warnings += _port_warnings(draft)
    container = draft.main
    port = http_port(container)
    ports = objects(container.get("ports"))
    if port not in [entry.get("containerPort") for entry in ports]:
        ports.append({"name": "http", "containerPort": port, "protocol": "TCP"})
    draft.containers[draft.main_index] = {
        **_probes(port),
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVING_S}}},
        **container,
        "ports": listed(ports),
    }


def _with_health(container: Manifest, port: int) -> Manifest:
    """Add the health port and probes to a container that runs a worker, each unless the user states it.

    Pods are then Ready when their workers are announced: a rolling update waits for that, and takes no more
    workers away than it may.
    """
    lists = [container.get("command"), container.get("args")]
    arguments = [arg for each in lists if isinstance(each, list) for arg in each]
    if arguments[:2] != ["kvrouter", "worker"]:
        return container
    opened = offered(container, [variable(HEALTH_PORT_VARIABLE, str(port))])
    stated = value_of(opened, HEALTH_PORT_VARIABLE) or ""
    is_known = stated.isascii() and stated.isdigit()
    return {**_probes(int(stated)), **opened} if is_known else opened


def _probes(port: int) -> Manifest:
    return {
        "startupProbe": _probe("/health", port, period_s=2, failures=60),
        "readinessProbe": _probe("/accepting", port, period_s=5, failures=2),
        "livenessProbe": _probe("/health", port, period_s=10, failures=6),
    }


def _probe(path: str, port: int, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
