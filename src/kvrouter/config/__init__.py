"""Settings and the fleet file: one source for flags, environment, YAML and the documentation pages.

The names below are loaded when they are first used: a command line that shows its help needs
none of the models.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter.config.fleet import FleetFile as FleetFile
    from kvrouter.config.fleet import KvTransferSpec as KvTransferSpec
    from kvrouter.config.fleet import LinkSpec as LinkSpec
    from kvrouter.config.fleet import LinksSpec as LinksSpec
    from kvrouter.config.fleet import ModelSpec as ModelSpec
    from kvrouter.config.fleet import PairLink as PairLink
    from kvrouter.config.fleet import TopologySpec as TopologySpec
    from kvrouter.config.fleet import WorkerGroup as WorkerGroup
    from kvrouter.config.fleet_checks import LoadedFleet as LoadedFleet
    from kvrouter.config.fleet_checks import default_fleet_document as default_fleet_document
    from kvrouter.config.fleet_checks import load_fleet as load_fleet
    from kvrouter.config.fleet_engines import AttachedEngineSpec as AttachedEngineSpec
    from kvrouter.config.fleet_engines import HandoffKind as HandoffKind
    from kvrouter.config.fleet_engines import MockEngineSpec as MockEngineSpec
    from kvrouter.config.fleet_engines import MockTiming as MockTiming
    from kvrouter.config.planes import DiscoveryBackend as DiscoveryBackend
    from kvrouter.config.planes import EventPlaneKind as EventPlaneKind
    from kvrouter.config.planes import PlaneSettings as PlaneSettings
    from kvrouter.config.planes import RequestPlaneKind as RequestPlaneKind
    from kvrouter.config.problems import Document as Document
    from kvrouter.config.problems import parse_document as parse_document
    from kvrouter.config.problems import read_document as read_document
    from kvrouter.config.recording import RecordingSettings as RecordingSettings
    from kvrouter.config.router import KvRouterConfig as KvRouterConfig
    from kvrouter.config.sources import Loaded as Loaded
    from kvrouter.config.sources import load_settings as load_settings
    from kvrouter.config.tree import AdminAccess as AdminAccess
    from kvrouter.config.tree import FrontendSettings as FrontendSettings
    from kvrouter.config.tree import LogFormat as LogFormat
    from kvrouter.config.tree import LogLevel as LogLevel
    from kvrouter.config.tree import LogSettings as LogSettings
    from kvrouter.config.tree import Settings as Settings
    from kvrouter.config.tree import TokenizeFallback as TokenizeFallback
    from kvrouter.config.tree import UnknownNvext as UnknownNvext
    from kvrouter.topology import MismatchPolicy as MismatchPolicy

_HOME = {
    "AdminAccess": "kvrouter.config.tree",
    "AttachedEngineSpec": "kvrouter.config.fleet_engines",
    "DiscoveryBackend": "kvrouter.config.planes",
    "Document": "kvrouter.config.problems",
    "EventPlaneKind": "kvrouter.config.planes",
    "FleetFile": "kvrouter.config.fleet",
    "FrontendSettings": "kvrouter.config.tree",
    "HandoffKind": "kvrouter.config.fleet_engines",
    "KvRouterConfig": "kvrouter.config.router",
    "KvTransferSpec": "kvrouter.config.fleet",
    "LinkSpec": "kvrouter.config.fleet",
    "LinksSpec": "kvrouter.config.fleet",
    "Loaded": "kvrouter.config.sources",
    "LoadedFleet": "kvrouter.config.fleet_checks",
    "LogFormat": "kvrouter.config.tree",
    "LogLevel": "kvrouter.config.tree",
    "LogSettings": "kvrouter.config.tree",
    "MismatchPolicy": "kvrouter.topology",
    "MockEngineSpec": "kvrouter.config.fleet_engines",
    "MockTiming": "kvrouter.config.fleet_engines",
    "ModelSpec": "kvrouter.config.fleet",
    "PairLink": "kvrouter.config.fleet",
    "PlaneSettings": "kvrouter.config.planes",
    "RecordingSettings": "kvrouter.config.recording",
    "RequestPlaneKind": "kvrouter.config.planes",
    "Settings": "kvrouter.config.tree",
    "TopologySpec": "kvrouter.config.fleet",
    "TokenizeFallback": "kvrouter.config.tree",
    "UnknownNvext": "kvrouter.config.tree",
    "WorkerGroup": "kvrouter.config.fleet",
    "default_fleet_document": "kvrouter.config.fleet_checks",
    "load_fleet": "kvrouter.config.fleet_checks",
    "load_settings": "kvrouter.config.sources",
    "parse_document": "kvrouter.config.problems",
    "read_document": "kvrouter.config.problems",
}

__all__ = [  # noqa: PLE0604 - each name is one of _HOME's, which __getattr__ finds
    *_HOME
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvrouter.config' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
