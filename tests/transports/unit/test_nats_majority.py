"""A bucket whose NATS servers cannot agree on anything is a lost store."""

import pytest
from nats.js.api import ClusterInfo, PeerInfo

from kvrouter.transports.records.nats.store import PEER_ACTIVE_WITHIN_S, check_majority

NS = 1_000_000_000
HEARD = PeerInfo(current=True, active=NS)
LONG_AGO = PeerInfo(current=True, active=int(PEER_ACTIVE_WITHIN_S * NS))
NEVER = PeerInfo(current=False, active=0)


@pytest.mark.parametrize(
    "cluster",
    [
        None,
        ClusterInfo(leader="a"),
        ClusterInfo(leader="a", replicas=[HEARD, HEARD]),
        ClusterInfo(leader="a", replicas=[HEARD, NEVER]),
        ClusterInfo(leader="a", replicas=[HEARD, HEARD, LONG_AGO, NEVER]),
    ],
)
def test_bucket_with_a_majority_passes_the_check(cluster: ClusterInfo | None) -> None:
    check_majority("bucket", cluster)


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        (ClusterInfo(leader=None, replicas=[HEARD, HEARD]), "no leader"),
        (ClusterInfo(leader="a", replicas=[LONG_AGO, NEVER]), "1 of 3 are there"),
        (ClusterInfo(leader="a", replicas=[LONG_AGO]), "1 of 2 are there"),
        (ClusterInfo(leader="a", replicas=[HEARD, LONG_AGO, NEVER, NEVER]), "2 of 5 are there"),
    ],
)
def test_bucket_without_a_majority_is_a_connection_error(cluster: ClusterInfo, why: str) -> None:
    with pytest.raises(ConnectionError, match=f"keep bucket are away: .*{why}"):
        check_majority("bucket", cluster)
