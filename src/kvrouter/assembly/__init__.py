"""The composition root: the only place that names adapters and puts the rooms together."""

from kvrouter.assembly.mock_fleet import MockFleet
from kvrouter.assembly.router import build_service
from kvrouter.assembly.serve import Embedded, embedded, serve

__all__ = ["Embedded", "MockFleet", "build_service", "embedded", "serve"]
