"""Discovery by objects of a Kubernetes API server, one for each worker; and pods that hold engines."""

from kvrouter.transports.discovery.kubernetes.cordons import KubernetesCordons
from kvrouter.transports.discovery.kubernetes.discovery import KubernetesDiscovery
from kvrouter.transports.discovery.kubernetes.objects import OwnerPod
from kvrouter.transports.discovery.kubernetes.pods import PodsApi, PodsWatch, pods_reason

__all__ = [
    "KubernetesCordons",
    "KubernetesDiscovery",
    "OwnerPod",
    "PodsApi",
    "PodsWatch",
    "pods_reason",
]
