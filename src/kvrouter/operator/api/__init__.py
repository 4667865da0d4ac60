"""The API: DynamoGraphDeployment as models and as a definition, and Grove's topologies as they are read."""

from kvrouter.operator.api.deployment import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    ComponentSpec,
    ComponentType,
    DeploymentReading,
    DeploymentSpec,
    DynamoGraphDeployment,
    PrefillTopology,
    read_deployment,
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
from kvrouter.operator.api.qos import LevelQoS, LinkQoS, NetworkQoS, PairQoS
from kvrouter.operator.api.status import (
    ComponentStatus,
    Condition,
    ConditionStatus,
    DeploymentStatus,
    DomainStatus,
    LinkStatus,
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
    "ClusterTopology",
    "ComponentSpec",
    "ComponentStatus",
    "ComponentType",
    "Condition",
    "ConditionStatus",
    "DeploymentReading",
    "DeploymentSpec",
    "DeploymentStatus",
    "DomainStatus",
    "DynamoGraphDeployment",
    "Level",
    "LevelQoS",
    "LinkQoS",
    "LinkStatus",
    "NetworkQoS",
    "PairQoS",
    "PolicyStatus",
    "PrefillTopology",
    "read_deployment",
    "read_topology",
    "topology_label",
]
