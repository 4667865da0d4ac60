"""Mock engines as adapters: real time, streams, and handoffs between processes."""

from kvrouter.engines.mock.cluster import MockCluster, MockEngineHandle, MockStream
from kvrouter.engines.mock.transfer import PeerRefusal, TransferCounts, TransferSettings

__all__ = [
    "MockCluster",
    "MockEngineHandle",
    "MockStream",
    "PeerRefusal",
    "TransferCounts",
    "TransferSettings",
]
