"""A kubelet for tests: it runs a pod's containers as plain processes of this machine."""

from tests.system.cluster.kubelet.door import ServiceProxy
from tests.system.cluster.kubelet.kubelet import Kubelet
from tests.system.cluster.kubelet.pod import PlayedPod

__all__ = ["Kubelet", "PlayedPod", "ServiceProxy"]
