"""The status of a deployment: conditions, replicas, and the balance of its domains."""

from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Le, MaxLen
from pydantic import Field

from kvrouter.core.workers import Enforcement
from kvrouter.operator.api.names import ObjectPart, list_map

DOMAINS_MAX = 256
BALANCE_CHARS_MAX = 256
LINKS_MAX = 64
BANDWIDTH_MAX = 10**18
"""Fits the API server's int64."""

Count = Annotated[int, Ge(0), Field(json_schema_extra={"format": "int32"})]
NEVER_OBSERVED = -1
"""The observed generation before an operator wrote a status: tools that wait take it for unfinished."""
Generation = Annotated[int, Ge(0), Field(json_schema_extra={"format": "int64"})]


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ObjectPart):
    """One thing that holds or does not."""

    type: Annotated[str, MaxLen(316)]
    """Which condition: Ready, Available, TopologyResolved, DomainBalanced, Upgrading, Stalled or
    Reconciling."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, MaxLen(1024)]
    """One stable word for machines."""
    message: Annotated[str, MaxLen(32_768)]
    """One sentence for people: what is so, and how to fix it."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When its status last changed."""
    observed_generation: Generation | None = None
    """Generation of the deployment that it speaks of."""


class ComponentStatus(ObjectPart):
    """The pods of one component."""

    name: Annotated[str, MaxLen(63)]
    """Name of the component."""
    type: Annotated[str, MaxLen(63)]
    """Type of the component."""
    desired_replicas: Count = 0
    """Pods that there should be: as the component states, or else as its Deployment was scaled."""
    replicas: Count = 0
    """Pods that there are."""
    ready_replicas: Count = 0
    """Pods that are Ready."""
    updated_replicas: Count = 0
    """Pods of the latest template."""


class DomainStatus(ObjectPart):
    """The Ready pods whose labels place them in one domain."""

    value: Annotated[str, MaxLen(63)]
    """Value of the domain, such as us-east-1a."""
    prefill: Count = 0
    """Ready prefill workers there."""
    decode: Count = 0
    """Ready workers there that take decode legs."""


class LinkStatus(ObjectPart):
    """What routers learned of a kind of link, or of one link that differs from its kind."""

    model: Annotated[str, MaxLen(512)]
    """Model whose KV goes over it."""
    link: Annotated[str, MaxLen(2048)]
    """The kind, such as ``between two values of zone``, or where the link begins and ends."""
    bandwidth_bytes_per_second: Annotated[
        int, Ge(1), Le(BANDWIDTH_MAX), Field(json_schema_extra={"format": "int64"})
    ]
    """Bytes a second, to two digits."""
    latency_seconds: Annotated[float, Ge(0)]
    """What a transfer takes apart from its bytes, to two digits."""
    slow: bool
    """Whether it takes at least twice as long as it should."""


class PolicyStatus(ObjectPart):
    """The policy of KV transfers that is in force, however it was spelt."""

    domain: Annotated[str, MaxLen(63)]
    """Domain that KV transfers keep to."""
    enforcement: Enforcement
    """How strictly."""
    preferred_weight: float | None = None
    """Weight under ``preferred``."""
    cluster_topology_name: Annotated[str, MaxLen(253)] | None = None
    """Topology that the domain is a level of."""
    label_key: Annotated[str, MaxLen(317)] | None = None
    """Node label that the domain's values are read from."""


class DeploymentStatus(ObjectPart):
    """What the fleet is."""

    observed_generation: (
        Annotated[int, Ge(NEVER_OBSERVED), Field(json_schema_extra={"format": "int64"})] | None
    ) = None
    """Generation of the spec that this status speaks of; -1 until an operator wrote it."""
    operator: Annotated[str, MaxLen(381)] | None = None
    """Operator that looks after it: the namespace and name of its lease. Others leave it alone."""
    conditions: Annotated[tuple[Condition, ...], MaxLen(16), Field(json_schema_extra=list_map("type"))] = ()
    """Ready, Available, TopologyResolved and DomainBalanced; Upgrading while workers change by spec.upgrade,
    False if that is paused; Stalled while somebody has to change something,
    and Reconciling while it is not Ready and gets on."""
    components: Annotated[
        tuple[ComponentStatus, ...], MaxLen(25), Field(json_schema_extra=list_map("name"))
    ] = ()
    """Pods of each component."""
    policy: PolicyStatus | None = None
    """Policy of KV transfers that is in force; absent when there is none."""
    domains: Annotated[
        tuple[DomainStatus, ...], MaxLen(DOMAINS_MAX), Field(json_schema_extra=list_map("value"))
    ] = ()
    """Ready pods of each value of the policy's domain; of more than 256, those out of balance come first."""
    balance: Annotated[str, MaxLen(BALANCE_CHARS_MAX)] | None = None
    """Ready prefill and decode workers by domain, in short: ``us-east-1a 4/8, us-east-1b 4/0``."""
    links: (
        Annotated[
            tuple[LinkStatus, ...],
            MaxLen(LINKS_MAX),
            Field(json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        ]
        | None
    ) = None
    """Links as a frontend learned them from handoffs, slow ones first; absent while nothing is known."""
