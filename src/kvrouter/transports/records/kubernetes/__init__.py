"""Cards and cordons as objects of a Kubernetes API server; and a watch of pods with engines."""

from kvrouter.transports.records.kubernetes.cards import KubernetesDiscovery
from kvrouter.transports.records.kubernetes.cordons import KubernetesCordons
from kvrouter.transports.records.kubernetes.objects import OwnerPod
from kvrouter.transports.records.kubernetes.pods import PodsApi, PodsWatch, pods_reason

__all__ = [
    "KubernetesCordons",
    "KubernetesDiscovery",
    "OwnerPod",
    "PodsApi",
    "PodsWatch",
    "pods_reason",
]
