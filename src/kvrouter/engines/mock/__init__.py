"""Mock engines as real ones are attached: real time, streams, and handoffs between processes."""

from kvrouter.engines.mock.cluster import MockCluster, MockEngineHandle
from kvrouter.engines.mock.connection import TransferCounts, TransferSettings
from kvrouter.engines.mock.frames import Refusal
from kvrouter.engines.mock.stream import MockStream

__all__ = [
    "MockCluster",
    "MockEngineHandle",
    "MockStream",
    "Refusal",
    "TransferCounts",
    "TransferSettings",
]
