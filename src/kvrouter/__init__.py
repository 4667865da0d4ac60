"""kvrouter: a KV-cache-aware, topology-aware router for LLM serving fleets.

The names below are loaded when they are first used, so that ``import kvrouter`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter.core.constraints import RoutingConstraints as RoutingConstraints
    from kvrouter.core.errors import KvrouterError as KvrouterError
    from kvrouter.core.workers import ModelInput as ModelInput
    from kvrouter.core.workers import ModelRuntimeConfig as ModelRuntimeConfig
    from kvrouter.core.workers import ModelType as ModelType
    from kvrouter.library import Client as Client
    from kvrouter.library import Endpoint as Endpoint
    from kvrouter.library import KvIndexer as KvIndexer
    from kvrouter.library import KvPushRouter as KvPushRouter
    from kvrouter.library import KvRouter as KvRouter
    from kvrouter.library import Runtime as Runtime
    from kvrouter.library import mock_fleet as mock_fleet
    from kvrouter.settings.planes import PlaneSettings as PlaneSettings
    from kvrouter.settings.router_settings import KvRouterConfig as KvRouterConfig
    from kvrouter.settings.tree import Settings as Settings
    from kvrouter.worker import KvPublisher as KvPublisher
    from kvrouter.worker import register_llm as register_llm

_HOME = {
    "Client": "kvrouter.library",
    "Endpoint": "kvrouter.library",
    "KvIndexer": "kvrouter.library",
    "KvPublisher": "kvrouter.worker",
    "KvPushRouter": "kvrouter.library",
    "KvRouter": "kvrouter.library",
    "KvRouterConfig": "kvrouter.settings.router_settings",
    "KvrouterError": "kvrouter.core.errors",
    "ModelInput": "kvrouter.core.workers",
    "ModelRuntimeConfig": "kvrouter.core.workers",
    "ModelType": "kvrouter.core.workers",
    "PlaneSettings": "kvrouter.settings.planes",
    "RoutingConstraints": "kvrouter.core.constraints",
    "Runtime": "kvrouter.library",
    "Settings": "kvrouter.settings.tree",
    "mock_fleet": "kvrouter.library",
    "register_llm": "kvrouter.worker",
}

__all__ = [  # noqa: PLE0604 - each name is one of _HOME's, which __getattr__ finds
    *_HOME
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvrouter' has no attribute {name!r}")
    return getattr(import_module(home), name)
