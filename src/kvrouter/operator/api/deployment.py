"""DynamoGraphDeployment, ``nvidia.com/v1beta1``: what a user writes."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, Field, JsonValue, Strict, ValidationError
from pydantic_core import ErrorDetails

from kvrouter.core.constraints import NearEnforcement
from kvrouter.core.workers import Enforcement, Role
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.operator.api.names import (
    TOPOLOGY_LABEL_PREFIX,
    ComponentName,
    DomainName,
    LabelKey,
    ObjectName,
    ObjectPart,
    Quantity,
    Rule,
    VariableName,
    list_map,
    rules,
)
from kvrouter.operator.api.qos import NetworkQoS
from kvrouter.operator.api.rollout import PROGRESS_DEADLINE_S, Strategy, Upgrade
from kvrouter.operator.api.status import NEVER_OBSERVED, DeploymentStatus
from kvrouter.settings.problems import Path, Problem, did_you_mean, innermost, problem_of

GROUP = "nvidia.com"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DynamoGraphDeployment"
PLURAL = "dynamographdeployments"

COMPONENTS_MAX = 25
REPLICAS_MAX = 10_000
SHARED_MAX = 64
"""How many labels, annotations or variables a deployment may give all of its components."""

OPERATORS_PREFIX = "kvrouter.dev/"
RESERVED_LABELS_PREFIXES = (OPERATORS_PREFIX, TOPOLOGY_LABEL_PREFIX)
RESERVED_LABELS = (
    "app.kubernetes.io/component",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/name",
    "pod-template-hash",
)
"""Labels that the operator sets: no deployment has them for all of its components."""

SECONDS_MAX = 7 * 24 * 3600
"""The longest time that a rollout waits."""

OF_FRONTENDS = "belongs to the component of type frontend"
BELOW_DEADLINE = f"must be below progressDeadlineSeconds, which is {PROGRESS_DEADLINE_S} where it is left out"
TYPE_IS_IMMUTABLE = "cannot change: add a component under another name, then remove this one"
TOPOLOGY_IS_IMMUTABLE = "cannot change once it is set: delete the deployment and create it again"


class ComponentType(StrEnum):
    """What a component's pods are; ``worker`` serves both legs of a request."""

    FRONTEND = "frontend"
    PREFILL = "prefill"
    DECODE = "decode"
    WORKER = "worker"

    @property
    def is_worker(self) -> bool:
        """Whether its pods run engines."""
        return self is not ComponentType.FRONTEND

    @property
    def role(self) -> Role | None:
        """The role that its workers register with; None for a frontend."""
        return _ROLES.get(self)


_ROLES = {
    ComponentType.PREFILL: Role.PREFILL,
    ComponentType.DECODE: Role.DECODE,
    ComponentType.WORKER: Role.BOTH,
}


class PrefillTopology(ObjectPart):
    """Where prompts are prefilled: near the frontend that takes them."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.weight) || !has(self.enforcement) || self.enforcement == 'preferred'",
                "weight is only for enforcement: preferred",
            )
        )
    )

    level: DomainName
    """Level in which prefill keeps near: to workers that have the frontend's own value of it. A level of the
    topology, or the domain of ``label``."""
    enforcement: NearEnforcement = NearEnforcement.PREFERRED
    """``required``: a request that no worker near may take is refused. ``preferred``: workers that are near
    cost less."""
    weight: Annotated[float, Strict(), Ge(0), Le(1)] | None = None
    """How much less under ``preferred``, from 0 (nothing) to 1. Left out, the router's own default."""


class KvCacheTransferTopology(ObjectPart):
    """The policy of KV transfers, on the frontend component."""

    level: DomainName
    """Level of the topology that KV never leaves: a domain of the topology's spec.levels, or any name for
    what ``label`` tells apart."""
    mismatch_policy: MismatchPolicy = MismatchPolicy.FAIL
    """What becomes of a request whose prefill worker has no decode worker in its own domain: ``fail`` refuses
    it before prefill, ``fallback`` lets any decode worker take it."""
    label: LabelKey | None = None
    """Key of the node label that tells the domains apart, such as topology.kubernetes.io/zone. With it no
    ClusterTopology is read, and Grove need not be there."""
    kv_transfer_weight: Annotated[float, Strict(), Ge(0)] | None = None
    """How many blocks of work one second of expected KV transfer counts as where a decode worker is chosen:
    the larger, the more the links of ``networkQoS`` decide. At 0, or left out, they are not weighed so."""
    network_qos: Annotated[NetworkQoS | None, Field(alias="networkQoS")] = None
    """The links between workers. Each level, each pair and ``across`` takes precedence over what the topology
    says of it."""
    prefill: PrefillTopology | None = None
    """Keeps prefill near the frontend, whose pods then get their node's place as workers' do. Left out,
    prompts are prefilled anywhere."""


class KvTransferPolicy(ObjectPart):
    """The policy of KV transfers, for the whole graph."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "has(self.labelKey) != has(self.clusterTopologyName)",
                "exactly one of labelKey and clusterTopologyName is needed",
            ),
            Rule(
                "!has(self.preferredWeight) || (has(self.enforcement) && self.enforcement == 'preferred')",
                "preferredWeight is only for enforcement: preferred",
            ),
            Rule(
                "!has(self.enforcement) || self.enforcement != 'preferred' || has(self.preferredWeight)",
                "enforcement: preferred needs preferredWeight, from 0 to 1",
            ),
        )
    )

    label_key: LabelKey | None = None
    """Key of the node label that tells the domains apart. Exactly one of labelKey and clusterTopologyName."""
    cluster_topology_name: ObjectName | None = None
    """Name of Grove's ClusterTopologyBinding (or ClusterTopology) whose levels name the domains."""
    domain: DomainName
    """Domain that KV transfers keep to: a level of the topology, or any name for what ``labelKey`` tells
    apart."""
    enforcement: Enforcement = Enforcement.REQUIRED
    """``required``: KV never leaves its domain. ``fallback``: only when no decode worker of the domain may
    take it. ``preferred``: cost decides, and the domain's own decode workers cost less."""
    preferred_weight: Annotated[float, Strict(), Ge(0), Le(1)] | None = None
    """How much less under ``preferred``, from 0 (nothing) to 1."""


class PodTopologyConstraint(ObjectPart):
    """Where one component's pods are placed."""

    pack_domain: DomainName
    """Level of the deployment's topology: all pods of the component are placed in one domain of it. A pod for
    which that domain has no room stays Pending."""


class SpecTopologyConstraint(ObjectPart):
    """The topology of a deployment, and where its pods are placed."""

    cluster_topology_name: Annotated[
        ObjectName,
        Field(
            json_schema_extra=rules(Rule("self == oldSelf", f"clusterTopologyName {TOPOLOGY_IS_IMMUTABLE}"))
        ),
    ]
    """Name of Grove's ClusterTopologyBinding (or ClusterTopology). It cannot change once it is set."""
    pack_domain: DomainName | None = None
    """Level of the topology: all pods of the deployment are placed in one and the same domain of it, except
    those of components that name another level. A pod for which that domain has no room stays Pending."""


_NO_RESERVED_ANNOTATIONS = Rule(
    f"self.all(key, !key.startsWith('{OPERATORS_PREFIX}'))",
    f"annotations {OPERATORS_PREFIX}… are the operator's own",
)


Seconds = Annotated[int, Strict(), Ge(0), Le(SECONDS_MAX), Field(json_schema_extra={"format": "int32"})]


class ServiceType(StrEnum):
    """From where a Service is reached."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class FrontendService(ObjectPart):
    """The Service of a frontend."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """From where it is reached: ``ClusterIP`` (the cluster), ``NodePort`` or ``LoadBalancer``."""
    annotations: Annotated[
        Mapping[str, str], MaxLen(SHARED_MAX), Field(json_schema_extra=rules(_NO_RESERVED_ANNOTATIONS))
    ] = {}
    """Annotations of the Service alone, such as a load balancer's settings. They take precedence over
    ``spec.annotations``."""


class ComponentSpec(ObjectPart):
    """One set of equal pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.kvCacheTransferTopology) || self.type == 'frontend'",
                f"kvCacheTransferTopology {OF_FRONTENDS}",
            ),
            Rule("!has(self.service) || self.type == 'frontend'", f"service {OF_FRONTENDS}"),
            Rule(
                "(has(self.minReadySeconds) ? self.minReadySeconds : 0) < "
                f"(has(self.progressDeadlineSeconds) ? self.progressDeadlineSeconds : {PROGRESS_DEADLINE_S})",
                f"minReadySeconds {BELOW_DEADLINE}",
            ),
        )
    )

    name: ComponentName
    """Name of the component, unique in the deployment whatever its case."""
    type: Annotated[
        ComponentType, Field(json_schema_extra=rules(Rule("self == oldSelf", f"type {TYPE_IS_IMMUTABLE}")))
    ]
    """What its pods are: ``frontend`` (HTTP and router), ``prefill``, ``decode``, or ``worker`` (both). It
    cannot change."""
    replicas: (
        Annotated[int, Strict(), Ge(0), Le(REPLICAS_MAX), Field(json_schema_extra={"format": "int32"})] | None
    ) = None
    """How many pods. Left out, there is one at first, and then as many as the scaler of the component's
    Deployment says (a HorizontalPodAutoscaler, KEDA, kubectl scale): the operator leaves the number alone."""
    pod_template: Annotated[
        Mapping[str, JsonValue],
        Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
    ] = {}
    """Template of its pods, as in a Deployment. The operator adds what topology and routing need."""
    strategy: Strategy | None = None
    """How a change replaces its pods. Left out, frontends go one by one, each after a new one is Ready, and
    up to a quarter of workers at a time, before the new ones start."""
    min_ready_seconds: Seconds | None = None
    """For how long a new pod must be Ready before it counts as available, and the next one is replaced. Left
    out, 0; 60 on workers under spec.upgrade."""
    progress_deadline_seconds: Annotated[Seconds, Ge(1)] | None = None
    """Within how many seconds a rollout must get on; else it counts as stalled. Left out, 600: more where
    engines load longer."""
    shared_memory_size: Quantity | None = None
    """Size of ``/dev/shm`` in its containers, such as 8Gi: memory that counts as the containers' own. Left
    out, or 0, it is as large as the container runtime makes it."""
    service: FrontendService | None = None
    """Its Service; only on a component of type frontend."""
    topology_constraint: PodTopologyConstraint | None = None
    """Where its pods are placed; the deployment's own packDomain when it is left out."""
    kv_cache_transfer_topology: KvCacheTransferTopology | None = None
    """Policy of KV transfers; only on the component of type frontend."""


class Experimental(ObjectPart):
    """What may yet change its form."""

    kv_transfer_policy: KvTransferPolicy | None = None
    """Policy of KV transfers for the whole graph. It may be given instead of the frontend's
    kvCacheTransferTopology; given both, they must say the same."""


class EnvVariable(ObjectPart):
    """An environment variable, as in a container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("!has(self.value) || !has(self.valueFrom)", "exactly one of value and valueFrom")
        )
    )

    name: VariableName
    """Name of the variable."""
    value: str | None = None
    """Its value; ``$(NAME)`` refers to a variable before it."""
    value_from: Annotated[
        Mapping[str, JsonValue] | None,
        Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
    ] = None
    """Where its value comes from, as in a container: a Secret, a ConfigMap, a field of the pod."""


_NO_RESERVED_LABELS = Rule(
    "self.all(key, !("
    + " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_LABELS_PREFIXES)
    + f" || key in {[*RESERVED_LABELS]}))",
    f"the operator's own labels are reserved: {', '.join(RESERVED_LABELS)}, "
    f"{', '.join(f'{prefix}…' for prefix in RESERVED_LABELS_PREFIXES)}",
)
_UNIQUE = Rule(
    "self.all(a, self.exists_one(b, a.name.lowerAscii() == b.name.lowerAscii()))",
    "names of components must be unique, whatever their case",
)


class DeploymentSpec(ObjectPart):
    """One fleet: its components, and where its KV may go."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.components.all(c, !has(c.kvCacheTransferTopology) || "
                "has(c.kvCacheTransferTopology.label) || has(self.topologyConstraint))",
                "kvCacheTransferTopology needs its own label, or spec.topologyConstraint.clusterTopologyName",
            ),
            Rule(
                "self.components.all(c, !has(c.topologyConstraint) || has(self.topologyConstraint))",
                "a component's topologyConstraint needs spec.topologyConstraint.clusterTopologyName",
            ),
            Rule(
                "!has(oldSelf.topologyConstraint) || has(self.topologyConstraint)",
                f"topologyConstraint.clusterTopologyName {TOPOLOGY_IS_IMMUTABLE}",
            ),
        )
    )

    components: Annotated[
        tuple[ComponentSpec, ...],
        MinLen(1),
        MaxLen(COMPONENTS_MAX),
        Field(json_schema_extra={**list_map("name"), **rules(_UNIQUE)}),
    ]
    """The sets of pods that make up the fleet."""
    labels: Annotated[
        Mapping[str, str], MaxLen(SHARED_MAX), Field(json_schema_extra=rules(_NO_RESERVED_LABELS))
    ] = {}
    """Labels of everything that is made for the deployment, pods included. A component's podTemplate takes
    precedence."""
    annotations: Annotated[
        Mapping[str, str], MaxLen(SHARED_MAX), Field(json_schema_extra=rules(_NO_RESERVED_ANNOTATIONS))
    ] = {}
    """Annotations of everything that is made for the deployment, pods included. A component's podTemplate
    takes precedence."""
    env: Annotated[
        tuple[EnvVariable, ...], MaxLen(SHARED_MAX), Field(json_schema_extra=list_map("name"))
    ] = ()
    """Environment variables of every container, before its own. Those of a component's podTemplate take
    precedence, and may refer to these."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of all pods, unless a component's podTemplate names one."""
    topology_constraint: SpecTopologyConstraint | None = None
    """Topology of the deployment; kvCacheTransferTopology without a label reads its levels."""
    upgrade: Upgrade | None = None
    """How a change of workers' templates passes through the fleet. Left out, components change apart,
    and their pods in any order."""
    experimental: Experimental | None = None
    """What may yet change its form."""


class ObjectMeta(ObjectPart):
    """The fields of an object's metadata that are read."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    """Name of the object; empty while the API server has still to make one up."""
    namespace: str = ""
    """Namespace of the object."""
    uid: str = ""
    """Identity of the object: another one if it is deleted and created again."""
    generation: int = 0
    """How often its spec was changed."""
    labels: Mapping[str, str] = {}
    """Labels of the object."""
    annotations: Mapping[str, str] = {}
    """Annotations of the object."""
    deletion_timestamp: str | None = None
    """When its deletion began."""


NAME_RULES = (
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name becomes the name of Services: lower-case letters, digits and '-', first a letter",
    ),
    Rule(
        "self.spec.components.all(c, size(self.metadata.name) + size(c.name) < 63)",
        "metadata.name and the name of a component, joined by '-', must have at most 63 characters",
    ),
)


class DynamoGraphDeployment(ObjectPart):
    """One fleet of LLM engines behind one frontend, which may span several zones."""

    model_config = ConfigDict(json_schema_extra=rules(*NAME_RULES))

    api_version: str = API_VERSION
    """Version of this form: nvidia.com/v1beta1."""
    kind: str = KIND
    """Kind of the object: DynamoGraphDeployment."""
    metadata: ObjectMeta = ObjectMeta()
    """Name, namespace, labels and annotations."""
    spec: DeploymentSpec
    """What the fleet should be."""
    status: Annotated[
        DeploymentStatus | None,
        Field(json_schema_extra={"default": {"observedGeneration": NEVER_OBSERVED}}),
    ] = None
    """What the fleet is; the operator writes it."""


PROBLEMS_MAX = 20
"""How many mistakes are reported at once."""

ERRORS_READ_MAX = 1_000
"""Among how many mistakes the innermost are looked for."""

UNKNOWN_MAX = 10
"""How many fields without effect are named; each costs a search for the nearest name."""


class DeploymentReading(NamedTuple):
    """A deployment, or the problems with it; ``unknown`` are fields without effect."""

    deployment: DynamoGraphDeployment | None
    problems: tuple[Problem, ...] = ()
    unknown: tuple[Problem, ...] = ()


def read_deployment(document: object) -> DeploymentReading:
    """Return the deployment in ``document``, any JSON value, or the problems with it. Never raises."""
    if not isinstance(document, dict):
        return DeploymentReading(None, (Problem((), "must be an object"),))
    content = {key: value for key, value in document.items() if key != "status"}
    try:
        deployment = DynamoGraphDeployment.model_validate(content, by_alias=True, by_name=False)
    except ValidationError as error:
        errors = error.errors(include_url=False)[:ERRORS_READ_MAX]
        problems = innermost([_problem(found) for found in errors])
        return DeploymentReading(None, tuple(problems[:PROBLEMS_MAX]))
    return DeploymentReading(deployment, unknown=_unknown(deployment))


def _problem(error: ErrorDetails) -> Problem:
    path = error["loc"]
    for free in ("podTemplate", "valueFrom"):  # any JSON is right inside, so only its depth can be wrong
        if free in path[:-1]:
            return Problem(path[: path.index(free) + 1], "has too many parts inside each other")
    return problem_of(error, DynamoGraphDeployment)


def _unknown(deployment: DynamoGraphDeployment) -> tuple[Problem, ...]:
    """Return a problem for each of the first unknown fields, with its nearest known name, and the number of
    further ones.
    """
    found = list(islice(_unknown_in(deployment, ()), UNKNOWN_MAX))
    named = [
        Problem((*path, name), f"is no field of this form, and has no effect{did_you_mean(name, known)}")
        for path, name, known in found
    ]
    n_more = sum(1 for _ in _unknown_in(deployment, ())) - len(found)
    if n_more:
        named.append(Problem((), f"has {n_more} more fields that have no effect"))
    return tuple(named)


def _unknown_in(part: BaseModel, path: Path) -> Iterator[tuple[Path, str, Sequence[str]]]:
    """Yield the path of each unknown field, its name, and the names that are known there."""
    fields = type(part).model_fields
    known = [field.alias or name for name, field in fields.items()]
    for name in part.model_extra or {}:
        yield path, name, known
    for name, field in fields.items():
        value: object = getattr(part, name)
        here = (*path, field.alias or name)
        if isinstance(value, BaseModel):
            yield from _unknown_in(value, here)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if isinstance(entry, BaseModel):
                    yield from _unknown_in(entry, (*here, index))


CLASS = "kvrouter.dev/class"
"""Annotation of a deployment: the class of the operator that manages it."""

DEFAULT_CLASS = "kvrouter"
"""The class of an operator, and of a deployment, that states no other."""


def class_of(document: object) -> str:
    """Return the class of a deployment, any JSON value."""
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    stated = annotations.get(CLASS) if isinstance(annotations, Mapping) else None
    return stated if isinstance(stated, str) else DEFAULT_CLASS
