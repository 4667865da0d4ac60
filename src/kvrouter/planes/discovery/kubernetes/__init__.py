"""Discovery by objects of a Kubernetes API server, one for each worker; and pods that hold engines."""

from kvrouter.planes.discovery.kubernetes.account import Account, account_of_pod
from kvrouter.planes.discovery.kubernetes.discovery import KubernetesDiscovery
from kvrouter.planes.discovery.kubernetes.objects import Pod
from kvrouter.planes.discovery.kubernetes.pods import PodsApi, PodsWatch, pods_reason
from kvrouter.planes.discovery.kubernetes.server import STORE_ERRORS

__all__ = [
    "STORE_ERRORS",
    "Account",
    "KubernetesDiscovery",
    "Pod",
    "PodsApi",
    "PodsWatch",
    "account_of_pod",
    "pods_reason",
]
