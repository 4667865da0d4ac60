"""Writes statuses, and remembers the last one of each deployment."""

from collections.abc import Callable, Iterable

from pydantic import ValidationError

from kvrouter.kube.client import CONFLICT, NOT_FOUND, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.objects import Key, Manifest, key_of, uid_of
from kvrouter.operator.api.deployment import API_VERSION, KIND
from kvrouter.operator.api.status import Condition, DeploymentStatus
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS
from kvrouter.operator.reconcile.event_recorder import Recorder
from kvrouter.operator.status.finding import events_of


class StatusRefused(ClusterError):
    """The API server refuses the status of a deployment; the message is the API server's."""

    code = "status_refused"


async def write_status(
    client: KubeClient, manifest: Manifest, status: Manifest, *, version: str = ""
) -> None:
    """Apply the status of a deployment; with ``version`` only while it has that resourceVersion.

    Raises StatusRefused if the API server refuses the status itself, and ClusterError if the deployment is
    gone or has changed, or the same write may be accepted a moment later.
    """
    key = key_of(manifest)
    metadata: Manifest = {"namespace": key.namespace, "name": key.name, "uid": uid_of(manifest)}
    if version:
        metadata["resourceVersion"] = version
    applied: Manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
    try:
        await client.apply(DEPLOYMENTS_OF_GRAPHS, applied, subresource="status")
    except RequestRefused as refused:
        if refused.is_passing or refused.status == NOT_FOUND:
            raise
        raise StatusRefused(refused.detail) from refused


class StatusWriter:
    """Writes statuses and their events in the name of one operator. ``conditions_are`` is called with the
    conditions of each status, and with an empty tuple for a deployment that is forgotten.
    """

    def __init__(
        self,
        client: KubeClient,
        name: str,
        recorder: Recorder,
        conditions_are: Callable[[Key, Iterable[Condition]], None],
    ) -> None:
        self._client, self._name, self.recorder = client, name, recorder
        self._conditions_are = conditions_are
        self._written: dict[Key, tuple[str, DeploymentStatus]] = {}

    def is_own(self, manifest: Manifest) -> bool:
        """Whether the status in ``manifest`` is the one that this writer wrote last."""
        return self._written.get(key_of(manifest)) == (uid_of(manifest), _status_of(manifest))

    def before(self, manifest: Manifest) -> DeploymentStatus | None:
        """Return the last written status, which a watch may not show yet."""
        uid, status = self._written.get(key_of(manifest), ("", None))
        return status if uid == uid_of(manifest) else _status_of(manifest)

    async def write(self, manifest: Manifest, status: DeploymentStatus) -> None:
        """Write a status unless it is there already, and the events of its changes.

        Raises StatusRefused, and ClusterError.
        """
        self._conditions_are(key_of(manifest), status.conditions)
        status = status.model_copy(update={"operator": self._name})
        before = self.before(manifest)
        if status == before == _status_of(manifest):
            return
        key = key_of(manifest)
        known = self._written.get(key)
        self._written[key] = (uid_of(manifest), status)  # a watch may show it before this call ends
        try:
            encoded = status.model_dump(mode="json", by_alias=True, exclude_none=True)
            await write_status(self._client, manifest, encoded)
        except BaseException as error:
            del self._written[key]
            if known is not None:
                self._written[key] = known
            if isinstance(error, RequestRefused) and error.status in (NOT_FOUND, CONFLICT):
                return  # it was deleted meanwhile
            raise
        for event in events_of(before, status):
            await self.recorder.record(manifest, event.reason, event.note, warns=event.type.value != "Normal")

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone, or another operator's."""
        self._written.pop(key, None)
        self._conditions_are(key, ())


def _status_of(manifest: Manifest) -> DeploymentStatus | None:
    """Return the status in ``manifest``; None without one, or if it cannot be read."""
    if not manifest.get("status"):
        return None
    try:
        return DeploymentStatus.model_validate(manifest["status"], by_alias=True, by_name=False)
    except ValidationError:
        return None
