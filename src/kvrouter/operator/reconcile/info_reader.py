"""Reads the cluster's information again and again: its topologies, and features of its API server."""

import asyncio
from collections.abc import Callable

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.informer import RETRY_MAX_S, RETRY_S, FirstTries, wait_after
from kvrouter.kube.objects import Manifest, ResourceKind
from kvrouter.operator.api.grove import read_topology
from kvrouter.operator.cluster_info import TOPOLOGIES, ClusterInfo, Grove, by_name

INFO_EACH_S = 15.0
"""How often topologies are read again."""
COPIES_SINCE = (1, 35)
"""From this version on an API server copies a Binding's labels to its pod, unless that is turned off."""

Lost = Callable[[ResourceKind, ClusterError | None], None]
"""Called with a kind that cannot be watched or read; with None as error when it can again."""


async def read_cluster_info(client: KubeClient, *, is_first: bool = True) -> ClusterInfo:
    """Return the current information. Topologies that may not be read are unread, with the reason.

    Raises ClusterError when the cluster does not answer; unless this ``is_first``, also when it answers with
    an error of its own (429, 5xx): the last topologies then hold.
    """
    policies = await client.served("admissionregistration.k8s.io/v1")
    version = await client.version()
    grove, why, found = Grove.ABSENT, "", list[Manifest]()
    for kind in TOPOLOGIES:
        try:
            found += (await client.find(kind)).objects
        except RequestRefused as refused:
            if not is_first and refused.status not in (NOT_FOUND, FORBIDDEN):
                raise
            if refused.status != NOT_FOUND:
                grove, why = Grove.UNREAD, refused.message
        else:
            grove = Grove.PRESENT if grove is Grove.ABSENT else grove
    topologies = [topology for topology in map(read_topology, found) if topology is not None]
    return ClusterInfo(
        grove=grove,
        topologies=by_name(topologies),
        unread_because=why,
        has_mutating_policies="mutatingadmissionpolicies" in policies,
        copies_binding_labels=version >= COPIES_SINCE,
    )


async def cluster_info_for_admission(client: KubeClient) -> ClusterInfo:
    """Return the current information; topologies are unread if the cluster does not answer."""
    try:
        return await read_cluster_info(client)
    except ClusterError as error:
        return ClusterInfo(grove=Grove.UNREAD, unread_because=error.message)


class InfoReader:
    """Reads the information; while it cannot be read, the last reading holds.

    ``changed`` is called with each new reading that differs, ``lost`` as an informer calls it, and as late at
    the start.
    """

    def __init__(self, client: KubeClient, *, changed: Callable[[ClusterInfo], None], lost: Lost) -> None:
        self._client, self._changed, self._lost = client, changed, lost
        self._last: ClusterInfo | None = None
        self._is_lost = False
        self._first_tries = FirstTries()

    async def read(self) -> ClusterError | None:
        """Read once; return the error if that failed."""
        cluster_info, error = self._last, None
        try:
            cluster_info = await read_cluster_info(self._client, is_first=cluster_info is None)
        except ClusterError as failed:
            error = failed
            is_lost = self._is_lost or self._first_tries.is_loss()
        else:
            self._first_tries.worked()
            is_lost = False
        if self._is_lost is not is_lost:
            self._is_lost = is_lost
            self._lost(TOPOLOGIES[0], error)
        if cluster_info is not None and cluster_info != self._last:
            self._last = cluster_info
            self._changed(cluster_info)
        return error

    async def read_until_known(self) -> None:
        """Read until it succeeded once."""
        failures = Failures(Backoff(RETRY_S, RETRY_MAX_S))
        while True:
            error = await self.read()
            if error is None:
                return
            await asyncio.sleep(wait_after(failures, error))
