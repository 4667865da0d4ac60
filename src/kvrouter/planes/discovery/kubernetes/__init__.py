"""Discovery by objects of a Kubernetes API server, one for each worker."""

from kvrouter.planes.discovery.kubernetes.account import Account, account_of_pod
from kvrouter.planes.discovery.kubernetes.discovery import KubernetesDiscovery
from kvrouter.planes.discovery.kubernetes.objects import Pod

__all__ = ["Account", "KubernetesDiscovery", "Pod", "account_of_pod"]
