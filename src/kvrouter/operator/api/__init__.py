"""The API: DynamoGraphDeployment as models and as a definition, and Grove's topologies as they are read."""

from kvrouter.operator.api.deployment import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    Component,
    ComponentType,
    DeploymentSpec,
    DynamoGraphDeployment,
    KvCacheTransferTopology,
    KvTransferPolicy,
    ObjectMeta,
)
from kvrouter.operator.api.grove import (
    GROVE_GROUP,
    GROVE_PLURALS,
    GROVE_VERSION,
    ClusterTopology,
    Level,
    read_topology,
)
from kvrouter.operator.api.names import topology_label
from kvrouter.operator.api.reading import Reading, read_deployment
from kvrouter.operator.api.status import (
    ComponentStatus,
    Condition,
    ConditionStatus,
    DeploymentStatus,
    DomainStatus,
    PolicyStatus,
)

__all__ = [
    "API_VERSION",
    "GROUP",
    "GROVE_GROUP",
    "GROVE_PLURALS",
    "GROVE_VERSION",
    "KIND",
    "PLURAL",
    "VERSION",
    "ClusterTopology",
    "Component",
    "ComponentStatus",
    "ComponentType",
    "Condition",
    "ConditionStatus",
    "DeploymentSpec",
    "DeploymentStatus",
    "DomainStatus",
    "DynamoGraphDeployment",
    "KvCacheTransferTopology",
    "KvTransferPolicy",
    "Level",
    "ObjectMeta",
    "PolicyStatus",
    "Reading",
    "read_deployment",
    "read_topology",
    "topology_label",
]
