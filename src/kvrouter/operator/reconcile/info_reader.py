"""The cluster's facts, read again and again: its topologies, and what its API server can do."""

import asyncio
from collections.abc import Callable

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.informer import RETRY_MAX_S, RETRY_S, FirstTries, wait_after
from kvrouter.kube.objects import Manifest, ResourceKind
from kvrouter.operator.api.grove import read_topology
from kvrouter.operator.cluster_info import TOPOLOGIES, ClusterFacts, Grove, by_name

FACTS_S = 15.0
"""How often topologies are read again."""
COPIES_SINCE = (1, 35)
"""From this version on a Binding's labels reach its pod, unless somebody turned that off."""

Lost = Callable[[ResourceKind, ClusterError | None], None]
"""Is notified that a kind cannot be watched, or read; with None that it can again."""


async def read_facts(cluster: KubeClient, *, is_first: bool = True) -> ClusterFacts:
    """Return the facts of now. Topologies that may not be read are unread, with the reason.

    Raises ClusterError when the cluster cannot be asked; unless this ``is_first``, also where it answers with
    an error of its own (429, 5xx): the topologies that were read before hold.
    """
    policies = await cluster.served("admissionregistration.k8s.io/v1")
    version = await cluster.version()
    grove, why, found = Grove.ABSENT, "", list[Manifest]()
    for kind in TOPOLOGIES:
        try:
            found += (await cluster.find(kind)).objects
        except RequestRefused as refused:
            if not is_first and refused.status not in (NOT_FOUND, FORBIDDEN):
                raise
            if refused.status != NOT_FOUND:
                grove, why = Grove.UNREAD, refused.message
        else:
            grove = Grove.PRESENT if grove is Grove.ABSENT else grove
    topologies = [topology for topology in map(read_topology, found) if topology is not None]
    return ClusterFacts(
        grove=grove,
        topologies=by_name(topologies),
        unread_because=why,
        has_mutating_policies="mutatingadmissionpolicies" in policies,
        copies_binding_labels=version >= COPIES_SINCE,
    )


async def facts_for_admission(cluster: KubeClient) -> ClusterFacts:
    """Return the facts of now; a cluster that does not answer leaves its topologies unread."""
    try:
        return await read_facts(cluster)
    except ClusterError as error:
        return ClusterFacts(grove=Grove.UNREAD, unread_because=error.message)


class InfoReader:
    """Reads the facts; while they cannot be read, those that were read last hold.

    ``changed`` is called with facts that are others than before, ``lost`` as an informer calls it, and as
    late at the start.
    """

    def __init__(self, cluster: KubeClient, *, changed: Callable[[ClusterFacts], None], lost: Lost) -> None:
        self._cluster, self._changed, self._lost = cluster, changed, lost
        self._last: ClusterFacts | None = None
        self._is_lost = False
        self._first_tries = FirstTries()

    async def read(self) -> ClusterError | None:
        """Read them once; return why they could not be read."""
        facts, error = self._last, None
        try:
            facts = await read_facts(self._cluster, is_first=facts is None)
        except ClusterError as failed:
            error = failed
            is_lost = self._is_lost or self._first_tries.is_loss()
        else:
            self._first_tries.worked()
            is_lost = False
        if self._is_lost is not is_lost:
            self._is_lost = is_lost
            self._lost(TOPOLOGIES[0], error)
        if facts is not None and facts != self._last:
            self._last = facts
            self._changed(facts)
        return error

    async def read_until_known(self) -> None:
        """Read them again until they could be read once."""
        failures = Failures(Backoff(RETRY_S, RETRY_MAX_S))
        while True:
            error = await self.read()
            if error is None:
                return
            await asyncio.sleep(wait_after(failures, error))
