"""What each command runs, from its first log line to its exit code."""

from kvrouter.commands.up import Embedded, embedded, serve
from kvrouter.wiring.mock_fleet import MockFleet
from kvrouter.wiring.router import build_service

__all__ = ["Embedded", "MockFleet", "build_service", "embedded", "serve"]
