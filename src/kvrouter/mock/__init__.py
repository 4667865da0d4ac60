"""The mock engine: (now, input) → events. It knows nothing of sockets or asyncio."""

from kvrouter.mock.config import EngineHashing, KvLoadFailurePolicy, MockConfig
from kvrouter.mock.engine import EngineFull, MockEngine, Outputs
from kvrouter.mock.fabric import Fabric, FabricOutputs
from kvrouter.mock.handoff import Party, RemoteSink
from kvrouter.mock.links import DomainPair, LinkChange, LinkName, Links, Place
from kvrouter.mock.network import Carried, Network
from kvrouter.mock.remote import (
    Done,
    Failed,
    GiveUp,
    Join,
    Peer,
    PullId,
    Ready,
    RemoteOutput,
    SinkWord,
    SourceWord,
    ToSink,
    ToSource,
    Want,
)
from kvrouter.mock.sequence import (
    UNLIMITED_CREDIT,
    Content,
    LegSink,
    LegStamps,
    NamedContent,
    SequenceKey,
)

__all__ = [
    "UNLIMITED_CREDIT",
    "Carried",
    "Content",
    "DomainPair",
    "Done",
    "EngineFull",
    "EngineHashing",
    "Fabric",
    "FabricOutputs",
    "Failed",
    "GiveUp",
    "Join",
    "KvLoadFailurePolicy",
    "LegSink",
    "LegStamps",
    "LinkChange",
    "LinkName",
    "Links",
    "MockConfig",
    "MockEngine",
    "NamedContent",
    "Network",
    "Outputs",
    "Party",
    "Peer",
    "Place",
    "PullId",
    "Ready",
    "RemoteOutput",
    "RemoteSink",
    "SequenceKey",
    "SinkWord",
    "SourceWord",
    "ToSink",
    "ToSource",
    "Want",
]
