"""What mock engines did, told in one line as their process ends."""

import logging

from kvrouter.engines.mock import MockCluster
from kvrouter.telemetry import Event, log_event

_log = logging.getLogger("kvrouter.mock")


def tell_mock_account(cluster: MockCluster) -> None:
    """Log what the engines did, if it was anything that no router sees."""
    account = mock_account(cluster)
    if account:
        log_event(_log, Event.MOCK_ENDED, detail=account)


def mock_account(cluster: MockCluster) -> str:
    """KV carried between domains, pulls by and from other processes, refused connections, and how long the
    engines' clock stood still because the machine was too slow for them; "" when there was none of it.
    """
    counts = cluster.transfer_counts()
    told = [
        f"KV from {pair.src_domain or 'no domain'} to {pair.dst_domain or 'no domain'}: "
        f"{carried.transfers} transfers, {carried.arrived_bytes} bytes"
        for pair, carried in sorted(cluster.carried().items())
    ]
    if counts.outgoing:
        told.append(f"{counts.outgoing_done} of {counts.outgoing} pulls from other processes done")
    if counts.incoming:
        told.append(f"{counts.incoming_done} of {counts.incoming} pulls by other processes done")
    told += [f"{n} connections refused: {why}" for why, n in sorted(counts.refused.items())]
    if cluster.slipped_s:
        told.append(f"the engines' clock stood still for {cluster.slipped_s:.3f} s")
    return "; ".join(told)
