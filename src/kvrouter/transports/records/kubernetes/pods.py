"""Pods that are labelled as engines: list, watch and checks."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.workers import EnginePod, PodPort
from kvrouter.kube.account import Account, AccountConnection
from kvrouter.kube.client import CONFLICT, FORBIDDEN, ClusterError, KubeClient, RequestRefused, decoded
from kvrouter.kube.objects import EVENTS, Involved, Key, ResourceKind, WatchEvent, event_of
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.kubernetes.api import InformerFeed, why
from kvrouter.transports.records.port import StoreSink

PODS = ResourceKind("v1", "Pod", "pods")

PODS_MAX = 1024
"""How many pods are followed; further ones are reported, and followed as others leave."""

TICK_S = 1.0
QUIET_S = 150.0
"""Silence after which everything is listed again: the API server sends bookmarks once a minute."""

PodSink = Callable[[EnginePod], None]
"""Called with a pod's current state."""

GoneSink = Callable[[str], None]
"""Called with the uid of a pod that is gone, has ended, or is no engine any more."""


class _Port(msgspec.Struct, frozen=True, rename="camel"):
    container_port: int = 0
    name: str = ""
    protocol: str = "TCP"


class _Container(msgspec.Struct, frozen=True):
    name: str = ""
    ports: tuple[_Port, ...] | None = ()


class _Spec(msgspec.Struct, frozen=True, rename={"node": "nodeName"}):
    node: str = ""
    containers: tuple[_Container, ...] | None = ()


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""


class _Started(
    msgspec.Struct, frozen=True, rename={"restarts": "restartCount", "container_id": "containerID"}
):
    name: str = ""
    restarts: int = 0
    container_id: str = ""


class _Status(msgspec.Struct, frozen=True, rename={"pod_ip": "podIP", "containers": "containerStatuses"}):
    phase: str = ""
    pod_ip: str = ""
    conditions: tuple[_Condition, ...] | None = ()
    containers: tuple[_Started, ...] | None = ()


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


def _pod(text: bytes) -> _Pod:
    try:
        return decoded(text, _Pod)
    except ClusterError as error:
        raise ProtocolError(error.message) from error


def pod_of(text: bytes) -> EnginePod:
    """Decode a pod from the API server's JSON. Raises ProtocolError for anything else."""
    pod = _pod(text)
    metadata, status = pod.metadata, pod.status
    if not metadata.uid or not metadata.name:
        raise ProtocolError("the API server's answer: a pod without a name or uid", param="metadata")
    ports = [
        PodPort(port.name, port.container_port, container.name)
        for container in pod.spec.containers or ()
        for port in container.ports or ()
        if port.protocol == "TCP"
    ]
    conditions = {each.type: each.status for each in status.conditions or ()}
    return EnginePod(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        labels=metadata.labels or {},
        annotations=metadata.annotations or {},
        node=pod.spec.node,
        ip=status.pod_ip,
        ports=tuple(ports),
        starts={each.name: f"{each.restarts} {each.container_id}" for each in status.containers or ()},
        is_ready=conditions.get("Ready") == "True" and bool(status.pod_ip),
        is_leaving=metadata.deletion_timestamp is not None,
        is_over=status.phase in ("Succeeded", "Failed"),
    )


class PodsApi:
    """The pods of ``namespace`` that a label selector picks. Every method raises ClusterError.

    ``answer_s`` is how long the API server may take for an answer.
    """

    def __init__(self, account: Account, *, namespace: str, selector: str, answer_s: float) -> None:
        self._namespace = namespace
        self._selector = selector
        self._path = PODS.path(namespace)
        self._client = KubeClient(AccountConnection(account), answer_s=answer_s)

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._client.close()

    async def everything(self) -> tuple[list[msgspec.Raw], str]:
        """Return every pod, undecoded, and the resourceVersion of the list."""
        return await self._client.everything(self._path, labels=self._selector)

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Watch changes after ``version`` for about WATCH_S seconds; open once the context is entered."""
        return self._client.watch(self._path, version, labels=self._selector)

    async def write_event(self, pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        """Write a Kubernetes event about a pod. A repetition is not written while the first is kept."""
        about = Involved("v1", "Pod", Key(self._namespace, pod.name), pod.uid)
        event = event_of(
            about,
            reason,
            message,
            warns=warns,
            reporter="kvrouter",
            instance="kvrouter",
            now=datetime.now(UTC),
        )
        try:
            await self._client.create(EVENTS, event)
        except RequestRefused as error:
            if error.status != CONFLICT:
                raise


def pods_reason(error: Exception, *, needs: str = "list and watch on pods") -> str:
    """Return ``error`` as one line that a person can act on; ``needs`` are the required rights."""
    if isinstance(error, RequestRefused) and error.status == FORBIDDEN:
        return f"{why(error)} (bind a Role with {needs} to this pod's service account)"
    return why(error)


class PodsWatch(InformerFeed[msgspec.Raw]):
    """Delivers every pod that has not ended, and its changes. A lost API server removes no pod.

    ``on_refused`` is called for pods that cannot be decoded or followed: (which, why).
    """

    def __init__(
        self,
        api: PodsApi,
        *,
        on_pod: PodSink,
        on_gone: GoneSink,
        on_store: StoreSink,
        on_refused: TroubleSink,
        pods_max: int = PODS_MAX,
    ) -> None:
        super().__init__(api, name="discovery: watch pods", tick_s=TICK_S, quiet_s=QUIET_S)
        self._on_pod = on_pod
        self._on_gone = on_gone
        self._on_store = on_store
        self._on_refused = on_refused
        self._pods_max = pods_max
        self._uids: set[str] = set()
        self._is_lost = False
        self._has_left_out = False

    def is_in_doubt(self, now: float) -> bool:  # noqa: ARG002 - time changes nothing here
        """Whether there is room for pods that were not followed."""
        return self._has_left_out and len(self._uids) < self._pods_max

    def lose(self, error: ClusterError) -> None:
        """Report the API server as lost; all pods stay."""
        if not self._is_lost:
            self._is_lost = True
            self._on_store(False, pods_reason(error))

    def take_list(self, items: list[msgspec.Raw], asked_at: float) -> None:  # noqa: ARG002 - as above
        """Take the list of all pods: a pod that is not in it is gone, where all could be decoded."""
        if self._is_lost:
            self._is_lost = False
            self._on_store(True, "")
        pods: list[EnginePod] = []
        for item in items:
            try:
                pods.append(pod_of(bytes(item)))
            except ProtocolError as error:
                self._on_refused("a pod", error.message)
        if len(pods) == len(items):
            for uid in self._uids - {pod.uid for pod in pods}:
                self._remove(uid)
        self._has_left_out = False
        for pod in pods:
            self._add(pod)

    def take_event(self, event: WatchEvent) -> str:
        """Apply an event; return its resourceVersion."""
        text = bytes(event.object)
        version = _pod(text).metadata.resource_version
        if event.type == "DELETED":
            self._remove(pod_of(text).uid)
        elif event.type != "BOOKMARK":
            self._add(pod_of(text))
        return version

    def _add(self, pod: EnginePod) -> None:
        if pod.is_over:  # evicted pods remain listed for long, and must not use up the limit
            self._remove(pod.uid)
            return
        if pod.uid not in self._uids:
            if len(self._uids) >= self._pods_max:
                self._has_left_out = True
                self._on_refused(
                    f"pod {pod.name}", f"more than {self._pods_max} pods are labelled as engines"
                )
                return
            self._uids.add(pod.uid)
        self._on_pod(pod)

    def _remove(self, uid: str) -> None:
        if uid in self._uids:
            self._uids.discard(uid)
            self._on_gone(uid)
