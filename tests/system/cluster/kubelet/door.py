"""A Service: one address before the pods that it selects."""

from collections.abc import Mapping

from tests.system.cluster.kubelet.kubelet import Kubelet
from tests.system.cluster.kubelet.pod import PlayedPod
from tests.testing.tcp_proxy import TcpProxy


class ServiceProxy(TcpProxy):
    """Leads each new connection to one of the Service's Ready pods in turn, and resets it without any.

    Connections that are there stay with their pod, as behind a kube-proxy.
    """

    def __init__(self, kubelet: Kubelet, selector: Mapping[str, str], port: int) -> None:
        super().__init__("", port)
        self._kubelet = kubelet
        self._selector = selector
        self._pod_port = port
        self._turn = 0

    @property
    def url(self) -> str:
        """Where clients find the Service."""
        return f"http://127.0.0.1:{self.port}"

    def pods(self) -> list[PlayedPod]:
        """Return its endpoints."""
        selected = self._selector.items()
        return [pod for pod in self._kubelet.pods.values() if pod.is_ready and selected <= pod.labels.items()]

    def target(self) -> tuple[str, int]:
        pods = self.pods()
        if not pods:
            raise ConnectionRefusedError("the Service has no endpoints")
        self._turn += 1
        return pods[self._turn % len(pods)].address, self._pod_port
