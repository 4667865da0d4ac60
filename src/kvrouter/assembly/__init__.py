"""The composition root: the only place that names adapters and puts the rooms together."""

from kvrouter.assembly.router import build_service
from kvrouter.assembly.serve import serve

__all__ = ["build_service", "serve"]
