"""A kubelet for tests: it runs a pod's containers as plain processes of this machine."""

from tests.cluster.kubelet.door import ServiceProxy
from tests.cluster.kubelet.kubelet import Kubelet
from tests.cluster.kubelet.pod import PlayedPod

__all__ = ["Kubelet", "PlayedPod", "ServiceProxy"]
