"""Settings and the fleet file: one source for flags, environment, YAML and the documentation pages."""

from kvrouter.config.fleet import (
    FleetFile,
    KvTransferSpec,
    LinkSpec,
    LinksSpec,
    ModelSpec,
    PairLink,
    TopologySpec,
    WorkerGroup,
)
from kvrouter.config.fleet_checks import LoadedFleet, default_fleet_document, load_fleet
from kvrouter.config.fleet_engines import AttachedEngineSpec, HandoffKind, MockEngineSpec, MockTiming
from kvrouter.config.planes import DiscoveryBackend, EventPlaneKind, PlaneSettings, RequestPlaneKind
from kvrouter.config.problems import Document, parse_document, read_document
from kvrouter.config.recording import RecordingSettings
from kvrouter.config.router import KvRouterConfig
from kvrouter.config.sources import Loaded, load_settings
from kvrouter.config.tree import (
    AdminAccess,
    FrontendSettings,
    LogFormat,
    LogLevel,
    LogSettings,
    Settings,
    UnknownNvext,
)
from kvrouter.topology import MismatchPolicy

__all__ = [
    "AdminAccess",
    "AttachedEngineSpec",
    "DiscoveryBackend",
    "Document",
    "EventPlaneKind",
    "FleetFile",
    "FrontendSettings",
    "HandoffKind",
    "KvRouterConfig",
    "KvTransferSpec",
    "LinkSpec",
    "LinksSpec",
    "Loaded",
    "LoadedFleet",
    "LogFormat",
    "LogLevel",
    "LogSettings",
    "MismatchPolicy",
    "MockEngineSpec",
    "MockTiming",
    "ModelSpec",
    "PairLink",
    "PlaneSettings",
    "RecordingSettings",
    "RequestPlaneKind",
    "Settings",
    "TopologySpec",
    "UnknownNvext",
    "WorkerGroup",
    "default_fleet_document",
    "load_fleet",
    "load_settings",
    "parse_document",
    "read_document",
]
