"""Discovery by objects of a Kubernetes API server, one for each worker; and pods that hold engines."""

from kvrouter.transports.discovery.kubernetes.account import Account, account_of_pod
from kvrouter.transports.discovery.kubernetes.discovery import KubernetesDiscovery
from kvrouter.transports.discovery.kubernetes.objects import OwnerPod
from kvrouter.transports.discovery.kubernetes.pods import PodsApi, PodsWatch, pods_reason
from kvrouter.transports.discovery.kubernetes.server import STORE_ERRORS

__all__ = [
    "STORE_ERRORS",
    "Account",
    "KubernetesDiscovery",
    "OwnerPod",
    "PodsApi",
    "PodsWatch",
    "account_of_pod",
    "pods_reason",
]
