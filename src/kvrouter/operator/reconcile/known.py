"""What is read of the cluster before anything is judged or planned."""

from kvrouter.operator.api import read_topology
from kvrouter.operator.facts import ClusterFacts, Grove, by_name
from kvrouter.operator.reconcile.cluster import FORBIDDEN, NOT_FOUND, Cluster, ClusterError, Refused
from kvrouter.operator.reconcile.kinds import TOPOLOGIES, Manifest

POLICIES = "mutatingadmissionpolicies"
COPIES_SINCE = (1, 35)
"""From this version on a Binding's labels reach its pod, unless somebody turned that off."""


async def read_facts(cluster: Cluster, *, is_first: bool = True) -> ClusterFacts:
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
        except Refused as refused:
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
        has_mutating_policies=POLICIES in policies,
        copies_binding_labels=version >= COPIES_SINCE,
    )


async def facts_for_admission(cluster: Cluster) -> ClusterFacts:
    """Return the facts of now; a cluster that does not answer leaves its topologies unread."""
    try:
        return await read_facts(cluster)
    except ClusterError as error:
        return ClusterFacts(grove=Grove.UNREAD, unread_because=error.message)
