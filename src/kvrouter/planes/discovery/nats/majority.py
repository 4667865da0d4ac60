"""Whether the servers that keep a bucket can still agree on anything."""

from nats.js.api import ClusterInfo

HEARD_WITHIN_S = 2.5
"""A server that its leader has not heard for so long counts as gone; they tell each other every second."""

_NS_PER_S = 1e9


def check_majority(name: str, cluster: ClusterInfo | None) -> None:
    """Raise ConnectionError when most of the servers that keep ``name`` are away.

    Those that are left answer what they knew, for some time under their old leader, and take no writes: a
    lease that nobody could renew has not run out.
    """
    if cluster is None or not cluster.replicas:
        return
    if not cluster.leader:
        raise ConnectionError(f"most of the NATS servers that keep {name} are away: they have no leader")
    heard = [0 < (peer.active or 0) < HEARD_WITHIN_S * _NS_PER_S for peer in cluster.replicas]
    n_servers = 1 + len(heard)
    n_there = 1 + sum(heard)
    if 2 * n_there <= n_servers:
        raise ConnectionError(
            f"most of the NATS servers that keep {name} are away: {n_there} of {n_servers} are there"
        )
