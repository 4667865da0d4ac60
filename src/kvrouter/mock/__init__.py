"""The mock engine: (now, input) → events. It knows nothing of sockets or asyncio."""

from kvrouter.mock.config import EngineHashing, KvLoadFailurePolicy, MockConfig, Timing
from kvrouter.mock.engine import EngineFull, MockEngine, Outputs
from kvrouter.mock.fabric import Fabric, FabricOutputs
from kvrouter.mock.handoff import Party
from kvrouter.mock.network import Carried, DomainPair, Links, Network
from kvrouter.mock.sequence import UNLIMITED_CREDIT, SequenceKey

__all__ = [
    "UNLIMITED_CREDIT",
    "Carried",
    "DomainPair",
    "EngineFull",
    "EngineHashing",
    "Fabric",
    "FabricOutputs",
    "KvLoadFailurePolicy",
    "Links",
    "MockConfig",
    "MockEngine",
    "Network",
    "Outputs",
    "Party",
    "SequenceKey",
    "Timing",
]
