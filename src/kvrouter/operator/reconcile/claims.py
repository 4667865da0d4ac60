"""Claims: which of several operators manages a deployment."""

from collections.abc import Callable
from typing import NamedTuple

from kvrouter.core.clock import LastChange
from kvrouter.kube.client import KubeClient, RequestRefused
from kvrouter.kube.objects import LEASES, Key, Manifest, fields_of, key_of, uid_of, version_of
from kvrouter.operator.api.deployment import DEFAULT_CLASS
from kvrouter.operator.reconcile.status_writer import write_status

GONE_S = 120.0
"""How long another operator's lease must be unrenewed, or missing, before it counts as gone: far longer than
its replicas need to take over from each other, since two operators in turns would roll the fleet."""
AGAIN_S = 15.0
"""How often the lease is checked."""


class _ReadLease(NamedTuple):
    """Another operator's lease: the last change of its version, and the time of the last reading."""

    change: LastChange
    read_s: float


class Claims:
    """The claims of one operator, named by the lease that its replicas share, and by its class. It writes its
    name into the status of each deployment first, and leaves alone those that name another one of its class.

    ``clock`` returns monotonic seconds.
    """

    def __init__(
        self, client: KubeClient, lease: Key, clock: Callable[[], float], class_name: str = DEFAULT_CLASS
    ) -> None:
        self._client, self._clock, self.lease = client, clock, lease
        self.name = str(lease) if class_name == DEFAULT_CLASS else f"{class_name}:{lease}"
        self._held: dict[Key, str] = {}
        self._read: dict[str, _ReadLease] = {}

    async def other(self, manifest: Manifest) -> str | None:
        """Return the operator that manages a deployment instead of this one; None if this one does, from now
        on or already. Raises ClusterError, and is then to be called again.
        """
        key, holder = key_of(manifest), _holder(manifest)
        if holder == self.name or (not holder and self._held.get(key) == uid_of(manifest)):
            self._held[key] = uid_of(manifest)
            return None
        self._held.pop(key, None)
        is_of_another_class = _class_in(holder) != _class_in(self.name)  # and that one gave it up
        if holder and not is_of_another_class and not await self._is_gone(holder):
            return holder
        await self._claim(manifest)
        self._held[key] = uid_of(manifest)
        return None

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone."""
        self._held.pop(key, None)

    async def _claim(self, manifest: Manifest) -> None:
        """Write this operator's name. Refused with 409 if the deployment has changed since it was read:
        another operator may have been quicker.
        """
        claimed: Manifest = {**fields_of(manifest.get("status")), "operator": self.name}
        await write_status(self._client, manifest, claimed, version=version_of(manifest))

    async def _is_gone(self, holder: str) -> bool:
        """Whether another operator's lease was not renewed for long, by this process's own clock.

        An operator with an unreadable lease is not gone.
        """
        now_s, read = self._clock(), self._read.get(holder)
        change = LastChange() if read is None else read.change
        if read is not None and now_s < read.read_s + AGAIN_S / 2 and change.is_within(GONE_S, now_s):
            return False  # it was read for another of its deployments
        namespace, _, name = holder.rpartition(":")[2].rpartition("/")
        try:
            lease = await self._client.read(LEASES, Key(namespace, name))
        except RequestRefused:
            return False
        change.see(None if lease is None else version_of(lease), now_s)
        self._read[holder] = _ReadLease(change, now_s)
        return not change.is_within(GONE_S, now_s)


def takeover_instructions(name: str, holder: str, namespace: str, deployment: str) -> str:
    """Return the message of the event that another operator manages a deployment."""
    patch = f'{{"status": {{"operator": "{name}"}}}}'
    return (
        f"the operator {name} leaves this deployment to the operator {holder}, which looks after it already: "
        f"let one of them watch another namespace, or uninstall one. To hand it over: kubectl patch dgd "
        f"{deployment} --namespace {namespace} --subresource=status --type=merge --patch '{patch}'"
    )


def _class_in(name: str) -> str:
    """Return the class of an operator from its name."""
    return name.rpartition(":")[0] or DEFAULT_CLASS


def _holder(manifest: Manifest) -> str:
    holder = fields_of(manifest.get("status")).get("operator")
    return holder if isinstance(holder, str) else ""
