"""What an operator leaves in a cluster that no other object owns is removed, before it is uninstalled."""

import asyncio
from datetime import UTC, datetime

from kvrouter.operator.reconcile.bindings import remove_policies
from kvrouter.operator.reconcile.cluster import CONFLICT, Cluster, Refused
from kvrouter.operator.reconcile.election import Candidate, LeaseTimes
from kvrouter.operator.reconcile.kinds import LEASES, Key

TRIES = 5


async def clean_up(cluster: Cluster, lease: Key, identity: str, times: LeaseTimes) -> list[str]:
    """Remove the admission policies of the operator of ``lease``; return what went. Raises ClusterError.

    The lease is taken first, so that a replica that still leads writes none of them again: it stops at its
    next renewal. Unless they end, a replica leads again once the lease has run out.
    """
    candidate = Candidate(identity, lease, times)
    if await _is_taken(cluster, lease, candidate):
        await asyncio.sleep(2 * times.retry_s)
    return await remove_policies(cluster, lease)


async def _is_taken(cluster: Cluster, lease: Key, candidate: Candidate) -> bool:
    """Take the lease from whoever holds it; return False where nobody does."""
    for tries_left in reversed(range(TRIES)):
        found = await cluster.read(LEASES, lease)
        taken = candidate.take(found, datetime.now(UTC))
        if taken is None:
            return False
        try:
            await cluster.replace(LEASES, taken)
        except Refused as refused:
            if refused.status != CONFLICT or not tries_left:
                raise
        else:
            return True
    return False
